// The critical path: one line through the lanes that it runs on, and all else of the predicted step faded.

function readPath(path, column) {
  path.class = column(path.class);
  path.start = summed(column(path.start));
  path.duration = column(path.duration);
  return path;
}

// The lane on which a kind of ranks is shown, or else another one of its stages.
function laneOf(app, of) {
  const lanes = app.lanes.lanes.filter((lane) => lane.big && lane.step === app.report.steps[0]);
  return lanes.find((lane) => lane.step.classOf[lane.rank] === of) || lanes.find((lane) => lane.group.classes.includes(of));
}

function paintPath(app, tool, shown, width) {
  const { pen } = tool;
  const { path } = app.report;
  const at = (moment) => tool.offset + moment * tool.scale;
  const kept = new Map();
  const line = [];
  path.class.forEach((of, i) => {
    const stretch = [at(path.start[i]), at(path.start[i] + path.duration[i])];
    if (!kept.has(of)) kept.set(of, { lane: laneOf(app, of), stretches: [] });
    kept.get(of).stretches.push(stretch);
    line.push([kept.get(of).lane, stretch]);
  });
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, width - GUTTER, app.lanes.height);
  pen.clip();
  for (const lane of shown) {
    const own = kept.get(tool.step.classOf[lane.rank]);
    if (lane.step === tool.step) fade(pen, app.colours.ground, lane, own ? own.stretches : [], width);
  }
  pen.strokeStyle = app.colours.over;
  pen.lineWidth = 2;
  pen.lineJoin = "round";
  pen.beginPath();
  for (const [lane, [left, right]] of line) {
    if (!lane) continue;
    const box = rowsOf(lane)[0];
    pen.lineTo(left, box.top + box.height);
    pen.lineTo(right, box.top + box.height);
  }
  pen.stroke();
  pen.restore();
}

// Pale what lies between the `kept` stretches of a lane, which are in order.
function fade(pen, colour, lane, kept, width) {
  pen.globalAlpha = 0.7;
  pen.fillStyle = colour;
  let from = GUTTER;
  for (const [left, right] of [...kept, [width, width]]) {
    if (left > from) pen.fillRect(from, lane.top, left - from, lane.height);
    from = Math.max(from, right);
  }
  pen.globalAlpha = 1;
}
