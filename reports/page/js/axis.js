// The time axis, the lanes and the cursor.

function ticksOf(from, to, width) {
  const rough = ((to - from) * 90) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough);
  const ticks = [];
  for (let i = Math.ceil(from / step); i * step <= to; i++) ticks.push(i * step);
  return { ticks, step };
}

// One unit for all marks of an axis, by its end.
function axisUnit(end) {
  return TIMES.find(([least]) => end >= 2 * least) || TIMES[TIMES.length - 1];
}

function paintAxis(app) {
  const { pen, width, height } = sized(byId("axis"));
  const { state, colours } = app;
  const scale = (width - GUTTER) / (state.to - state.from);
  const [factor, unit] = axisUnit(state.to);
  const { ticks, step } = ticksOf(state.from, state.to, width - GUTTER);
  const digits = Math.max(0, Math.ceil(-Math.log10(step / factor) - 1e-9));
  pen.font = "11px Helvetica, Arial, sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = colours.quiet;
  pen.textAlign = "left";
  pen.fillText(`time (${unit})`, 0, height / 2);
  pen.textAlign = "center";
  for (const tick of ticks) {
    const x = GUTTER + (tick - state.from) * scale;
    pen.fillText((tick / factor).toFixed(digits), Math.min(Math.max(x, GUTTER + 10), width - 22), height / 2);
    pen.fillRect(x, height - 4, 1, 4);
  }
}

function paintLanes(app) {
  const scroller = byId("scroller");
  const { pen, width, height } = sized(byId("lanes"));
  byId("spacer").style.height = `${app.lanes.height}px`;
  const [top, bottom] = [scroller.scrollTop, scroller.scrollTop + height];
  pen.save();
  pen.translate(0, -top);
  const tools = new Map(app.report.steps.map((step) => [step, brush(app, step, pen, width)]));
  const shown = app.lanes.lanes.filter((lane) => lane.top + lane.height >= top && lane.top <= bottom);
  for (const lane of shown) paintLane(app, tools.get(lane.step), lane, width);
  if (pathShown(app)) paintPath(app, tools.get(app.report.steps[0]), shown, width);
  pen.restore();
  paintCursor(app, pen, width, height);
}

function paintLane(app, tool, lane, width) {
  const { pen } = tool;
  const rows = rowsOf(lane);
  const of = lane.step.classOf[lane.rank];
  const end = Math.min(tool.offset + (lane.step.length / lane.step.unit) * tool.scale, width);
  pen.fillStyle = app.colours.idle;
  pen.fillRect(Math.max(GUTTER, tool.offset), rows[0].top, Math.max(end - Math.max(GUTTER, tool.offset), 0), rows[0].height);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, lane.top, width - GUTTER, lane.height);
  pen.clip();
  for (const slice of of >= 0 ? lane.step.slices[of] : []) {
    const box = rows.find((row) => row.row === slice.row);
    if (box) paintSlice(tool, of, slice, box);
  }
  pen.restore();
  paintLabel(app, pen, lane, rows[0]);
}

function paintLabel(app, pen, lane, box) {
  const { colours, state } = app;
  if (lane.rank === state.rank) {
    pen.fillStyle = colours.accent;
    pen.fillRect(0, lane.top + 2, 3, lane.height - 3);
  }
  const step = app.report.steps.length > 1 && state.shown === "both" ? `, ${lane.step.name}` : "";
  const many = lane.group.ranks.length;
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  const write = (text, y, font, colour) => {
    pen.font = `${font} Helvetica, Arial, sans-serif`;
    pen.fillStyle = colour;
    pen.fillText(text, lane.big ? 10 : 30, y, GUTTER - (lane.big ? 14 : 34));
  };
  const like = lane.step.ranksOf[lane.step.classOf[lane.rank]].length;
  const rank = `rank ${lane.rank}${lane.big && like > 1 ? ` of ${formatCount(like)} alike` : ""}${step}`;
  const below = lane.big && lane.height >= 52 ? profiledText(app.report, lane.step) : "";
  if (below) write(below, lane.top + (lane.head ? 38 : 26), "11px", colours.quiet);
  if (!lane.head) return write(rank, lane.big ? box.top + Math.min(10, box.height / 2) : box.top + box.height / 2, "11px", lane.rank === state.rank ? colours.ink : colours.quiet);
  const mark = lane.opens ? (state.open.has(lane.index) ? "▾ " : "▸ ") : "";
  const title = `${mark}${stagesText(lane.group.stages)}`;
  if (lane.height >= 34) {
    write(title, lane.top + 10, "bold 12px", colours.ink);
    return write(rank, lane.top + 24, "11px", colours.quiet);
  }
  write(title, lane.top + lane.height / 2 - 1, "bold 12px", colours.ink);
  pen.textAlign = "right";
  pen.font = "11px Helvetica, Arial, sans-serif";
  pen.fillStyle = colours.quiet;
  pen.fillText(step ? lane.step.name : lane.rank === state.rank ? `rank ${lane.rank}` : plural(many, "rank"), GUTTER - 8, lane.top + lane.height / 2 - 1);
}

// How much longer a measured step took under the profiler, of which its spans are, than a timed one.
function profiledText(report, step) {
  if (step.name !== "measured" || !report.difference) return "";
  return `profiled: ${(step.step_time / report.difference.timed).toPrecision(2)} times a step`;
}

// The chosen moment as a full line, the pointer's as a thin one.
function paintCursor(app, pen, width, height) {
  const { state, colours } = app;
  const scale = (width - GUTTER) / (state.to - state.from);
  const line = (time, colour, dash) => {
    if (time === null || time < state.from || time > state.to) return;
    pen.strokeStyle = colour;
    pen.setLineDash(dash);
    pen.beginPath();
    const x = Math.round(GUTTER + (time - state.from) * scale) + 0.5;
    pen.moveTo(x, 0);
    pen.lineTo(x, height);
    pen.stroke();
    pen.setLineDash([]);
  };
  line(app.pointer, colours.quiet, [3, 3]);
  line(state.at, colours.ink, []);
}
