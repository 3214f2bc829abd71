// The report's numbers: columns out of the compressed block, spans in slices, passes merged out of spans.

const TYPES = { u1: Uint8Array, u4: Uint32Array, i4: Int32Array, f8: Float64Array };
const COMPUTE_ROW = 0;

async function readColumns() {
  const packed = Uint8Array.from(atob(byId("columns").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function readReport() {
  const report = JSON.parse(byId("document").textContent);
  const buffer = await readColumns();
  const column = (where) => new TYPES[where.type](buffer, where.at, where.count);
  report.devices = column(report.devices);
  report.nodes = column(report.nodes);
  report.steps.forEach((step) => readStep(step, column, report.kinds));
  if (report.path) readPath(report.path, column);
  return report;
}

function summed(changes) {
  for (let i = 1; i < changes.length; i++) changes[i] += changes[i - 1];
  return changes;
}

function readStep(step, column, kinds) {
  const spans = step.spans;
  step.classOf = column(step.class_of);
  for (const name of ["kind", "stage", "microbatch", "operators", "duration", "bytes"]) spans[name] = column(spans[name]);
  spans.start = summed(column(spans.start));
  const [classes, rows, streams, starts] = ["class", "row", "stream", "start"].map((name) => column(spans[`slice_${name}`]));
  step.slices = step.classes.map(() => []);
  step.rows = [...new Set(rows)].sort((a, b) => a - b);
  classes.forEach((of, i) => {
    const slice = { row: rows[i], stream: spans.streams[streams[i]], first: starts[i], end: starts[i + 1] };
    slice.reach = reachOf(spans, slice);
    if (slice.row === COMPUTE_ROW) slice.passes = passesOf(spans, slice, kinds);
    step.slices[of].push(slice);
  });
  step.chunkOf = step.classes.map((of) => new Map(of.stages.map((stage, chunk) => [stage, chunk])));
  step.ranksOf = step.classes.map(() => []);
  step.classOf.forEach((of, rank) => of >= 0 && step.ranksOf[of].push(rank));
  step.memoryOf = step.classes.map(() => null);
  step.memory.forEach((profile) => (step.memoryOf[profile.class] = readMemory(profile, column)));
}

// The latest end of a slice's spans up to each one: it rises, so it can be searched by halves.
function reachOf(spans, slice) {
  const reach = new Float64Array(slice.end - slice.first);
  let latest = 0;
  for (let i = slice.first; i < slice.end; i++) {
    latest = Math.max(latest, spans.start[i] + spans.duration[i]);
    reach[i - slice.first] = latest;
  }
  return reach;
}

// Spans of one microbatch's pass that follow each other on a stream, recomputation as a part of the backward around it.
function passesOf(spans, slice, kinds) {
  const names = kinds.map((kind) => kind.name);
  const [recompute, backward] = [names.indexOf("recompute"), names.indexOf("backward")];
  const passes = { first: [], kind: [], stage: [], microbatch: [], start: [], duration: [], recompute: [], reach: [] };
  let last = -1;
  for (let i = slice.first; i < slice.end; i++) {
    const again = spans.kind[i] === recompute;
    const kind = again ? backward : spans.kind[i];
    const [stage, microbatch, end] = [spans.stage[i], spans.microbatch[i], spans.start[i] + spans.duration[i]];
    const same = last >= 0 && microbatch >= 0 && passes.kind[last] === kind && passes.stage[last] === stage;
    if (!same || passes.microbatch[last] !== microbatch) {
      last += 1;
      for (const [name, value] of Object.entries({ first: i, kind, stage, microbatch, start: spans.start[i], recompute: 0 }))
        passes[name].push(value);
    }
    passes.duration[last] = Math.max(passes.duration[last] || 0, end - passes.start[last]);
    passes.reach[last] = Math.max(end, last ? passes.reach[last - 1] : 0);
    if (again) passes.recompute[last] += spans.duration[i];
  }
  return passes;
}

function readMemory(profile, column) {
  profile.times = summed(column(profile.times));
  profile.usage = profile.usage.map((where) => summed(column(where)));
  profile.totals = profile.times.length ? profile.usage.reduce((sum, of) => sum.map((value, i) => value + of[i])) : [];
  profile.peakIndex = profile.totals.reduce((best, total, i, all) => (total > all[best] ? i : best), 0);
  return profile;
}

// The first index from which `values`, which never fall, are above `limit` (at least `limit` where `from` is set).
function search(values, limit, from = false) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit || (from && values[middle] === limit)) high = middle;
    else low = middle + 1;
  }
  return low;
}
