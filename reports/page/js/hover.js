// What lies under the pointer, and what a span is in words.

function laneAt(app, y) {
  const at = y + byId("scroller").scrollTop;
  return app.lanes.lanes.find((lane) => at >= lane.top && at < lane.top + lane.height) || null;
}

function timeAt(app, x) {
  const { state } = app;
  return state.from + ((x - GUTTER) * (state.to - state.from)) / (byId("scroller").clientWidth - GUTTER);
}

// The span of a row at a moment, or the nearest within `slack` seconds; of several the shortest.
function spanAt(step, rank, row, time, slack) {
  const of = step.classOf[rank];
  const [low, high] = [(time - slack) / step.unit, (time + slack) / step.unit];
  const spans = step.spans;
  let found = null;
  for (const slice of of >= 0 ? step.slices[of] : []) {
    if (slice.row !== row) continue;
    for (let i = slice.first + search(slice.reach, low, true); i < slice.end && spans.start[i] <= high; i++) {
      const off = Math.max(spans.start[i] - time / step.unit, time / step.unit - spans.start[i] - spans.duration[i], 0);
      const better = !found || off < found.off || (off === found.off && spans.duration[i] < spans.duration[found.index]);
      if (better) found = { index: i, slice, off };
    }
  }
  return found;
}

// Communication of the data streams that is not among the ranks of a data group: tied weights, the norm of gradients.
const ELSEWHERE = /\b(tied|norm)\b/;

// Name and value of everything that is known of a span on a rank.
function spanFacts(app, step, rank, { index, slice }) {
  const { spans, unit } = step;
  const kind = app.report.kinds[spans.kind[index]];
  const facts = [["operator", spans.names[spans.operators[index]] || "–"], ["stage", spans.stage[index]]];
  if (spans.microbatch[index] >= 0) facts.push(["microbatch", spans.microbatch[index]]);
  facts.push(["start", formatTime(spans.start[index] * unit, 6)], ["duration", formatTime(spans.duration[index] * unit, 4)]);
  if (spans.bytes[index] > 0) facts.push(["bytes", formatSize(spans.bytes[index])]);
  facts.push(["stream", slice.stream]);
  const own = kind.name === "data communication" && ELSEWHERE.test(spans.names[spans.operators[index]]);
  const partners = own ? null : partnersOf(app.report, kind.name, slice.stream, spans.stage[index], rank);
  if (partners) facts.push([partners.word, partners.ranks]);
  if (partners && partners.links) facts.push([step.source.startsWith("measured") ? "planned link" : "link", partners.links]);
  return { title: kind.name, kind, facts };
}

function positionOf(report, rank) {
  const axis = report.mesh.find((of) => of.name === "pipeline");
  return axis ? Math.floor(rank / axis.stride) % axis.size : 0;
}

function partnersOf(report, kind, stream, stage, rank) {
  if (kind === "pipeline communication") return peerOf(report, stream, stage, rank);
  const group = report.groups.find((of) => of.kind === kind && (of.stream === stream || of.stream === ""));
  if (!group) return null;
  const ranks = membersOf(report.mesh.filter((axis) => group.axes.includes(axis.name)), rank);
  return { word: `${group.name} group`, ranks: `${ranks.length} ranks: ${formatRanks(ranks)}`, links: group.links[positionOf(report, rank)] };
}

function membersOf(axes, rank) {
  let ranks = [rank];
  for (const { size, stride } of axes) {
    const first = (of) => of - (Math.floor(of / stride) % size) * stride;
    ranks = ranks.flatMap((of) => Array.from({ length: size }, (_, i) => first(of) + i * stride));
  }
  return [...new Set(ranks)].sort((a, b) => a - b);
}

// A transfer's other end: spans name the stage that sends.
function peerOf(report, stream, stage, rank) {
  const to = stage + (stream.endsWith("backward") ? -1 : 1);
  const axis = report.mesh.find((of) => of.name === "pipeline");
  if (!axis || report.positions[to] === undefined) return null;
  const column = rank - positionOf(report, rank) * axis.stride;
  const [sender, receiver] = [stage, to].map((of) => column + report.positions[of] * axis.stride);
  const hop = report.hops.find((of) => of.from === stage && of.to === to);
  return { word: "transfer", ranks: `stage ${stage} to ${to}: rank ${sender} to ${receiver}`, links: hop ? hop.links : "" };
}

// Idle time of a lane around a moment: from the end of what ran before to the start of what runs next.
function idleAt(step, rank, time) {
  const of = step.classOf[rank];
  const at = time / step.unit;
  let [before, after] = [0, step.length / step.unit];
  for (const slice of of >= 0 ? step.slices[of] : []) {
    if (slice.row !== COMPUTE_ROW) continue;
    const next = search(slice.reach, at);
    if (next > 0) before = Math.max(before, slice.reach[next - 1]);
    if (slice.first + next < slice.end) after = Math.min(after, step.spans.start[slice.first + next]);
  }
  return after > before ? [before * step.unit, after * step.unit] : null;
}

function tooltipOf(app, x, y) {
  const lane = laneAt(app, y);
  const time = timeAt(app, x);
  if (!lane || x < GUTTER || time > lane.step.length) return null;
  const inside = y + byId("scroller").scrollTop;
  const box = rowsOf(lane).find((row) => inside >= row.top - 1 && inside <= row.top + row.height);
  if (!box) return null;
  const slack = (3 * (app.state.to - app.state.from)) / (byId("scroller").clientWidth - GUTTER);
  const found = spanAt(lane.step, lane.rank, box.row, time, slack);
  if (found) return { lane, found, ...spanFacts(app, lane.step, lane.rank, found) };
  const idle = box.row === COMPUTE_ROW ? idleAt(lane.step, lane.rank, time) : null;
  if (!idle) return null;
  const facts = [["start", formatTime(idle[0], 6)], ["duration", formatTime(idle[1] - idle[0], 4)]];
  return { lane, found: null, title: "waiting", kind: null, facts };
}
