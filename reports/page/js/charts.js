// Charts of a search: the best step time so far against evaluations and against time, with the bound.

function paintSearch(app) {
  const { report } = app;
  document.querySelectorAll("#search canvas").forEach((canvas, column) => paintHistory(app, canvas, report.searches, column));
}

function paintHistory(app, canvas, searches, column) {
  const { pen, width, height } = sized(canvas);
  const { colours } = app;
  const area = { left: 64, right: width - 14, top: 12, bottom: height - 44 };
  const points = searches.flatMap((of) => of.history);
  const bounds = searches.map((of) => of.bound).filter((bound) => bound > 0);
  if (!points.length) return;
  const ends = searches.map((of) => (column ? of.wall_time : of.evaluations));
  const x = axisOf([...points.map((point) => point[column]), ...ends], area.left, area.right, true);
  const y = axisOf([...points.map((point) => point[2]), ...bounds], area.bottom, area.top, false);
  paintFrame(pen, area, x, y, colours, column);
  if (bounds.length) {
    const at = y.place(Math.max(...bounds));
    pen.strokeStyle = pen.fillStyle = colours.ink;
    pen.setLineDash([6, 4]);
    stroke(pen, [[area.left, at], [area.right, at]]);
    pen.setLineDash([]);
    pen.textAlign = "right";
    pen.fillText("lower bound", area.right - 4, at + 10);
  }
  searches.forEach((of) => {
    const stairs = [];
    of.history.forEach((point) => {
      const at = [x.place(point[column]), y.place(point[2])];
      if (stairs.length) stairs.push([at[0], stairs[stairs.length - 1][1]]);
      stairs.push(at);
    });
    if (!stairs.length) return;
    stairs.push([Math.max(x.place(column ? of.wall_time : of.evaluations), stairs[stairs.length - 1][0]), stairs[stairs.length - 1][1]]);
    pen.strokeStyle = of.colour;
    pen.lineWidth = 2.2;
    stroke(pen, stairs);
    pen.lineWidth = 1;
    const first = stairs[0];
    pen.fillStyle = of.colour;
    pen.beginPath();
    pen.arc(first[0], first[1], 3.5, 0, 7);
    pen.fill();
  });
}

// An axis from pixel to pixel: logarithmic where its values span more than a factor of 50 (and `wide` allows it).
function axisOf(values, from, to, wide) {
  const above = values.filter((value) => value > 0);
  let [low, high] = [Math.min(...above), Math.max(...above)];
  const log = wide && high > 50 * low;
  if (!log) [low, high] = wide ? [0, high * 1.02] : [low - 0.12 * Math.max(high - low, 0.02 * high), high + 0.08 * Math.max(high - low, 0.02 * high)];
  const share = (value) => (log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low));
  const decades = log ? Array.from({ length: Math.ceil(Math.log10(high / low)) + 1 }, (_, i) => 10 ** (Math.ceil(Math.log10(low)) + i)) : [];
  const whole = (value) => !wide || !values.every(Number.isInteger) || Number.isInteger(value);
  const ticks = log ? decades.filter((value) => value <= high) : ticksOf(low, high, Math.abs(to - from)).ticks.filter(whole);
  return { place: (value) => from + share(value) * (to - from), ticks };
}

function paintFrame(pen, area, x, y, colours, column) {
  pen.font = "11px Helvetica, Arial, sans-serif";
  pen.textBaseline = "middle";
  for (const tick of y.ticks) {
    pen.fillStyle = colours.line;
    pen.fillRect(area.left, y.place(tick), area.right - area.left, 1);
    pen.fillStyle = colours.quiet;
    pen.textAlign = "right";
    pen.fillText(formatTime(tick, 4), area.left - 8, y.place(tick));
  }
  pen.textAlign = "center";
  for (const tick of x.ticks) pen.fillText(column ? formatTime(tick) : formatCount(Number(tick.toPrecision(6))), x.place(tick), area.bottom + 14);
  pen.fillStyle = colours.ink;
  pen.fillText(column ? "time of the search" : "evaluations", (area.left + area.right) / 2, area.bottom + 34);
}

function stroke(pen, points) {
  pen.beginPath();
  points.forEach(([x, y]) => pen.lineTo(x, y));
  pen.stroke();
}
