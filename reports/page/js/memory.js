// Memory of the chosen rank under the timeline: what each kind holds, stacked; capacity; the moment of the cursor.

const NEAR = 0.35; // of capacity, from which the axis goes up to it
const HEADROOM = 1.1;

function profileOf(step, rank) {
  const of = step.classOf[rank];
  return of >= 0 ? step.memoryOf[of] : null;
}

// The index of what is held at a moment in seconds.
function heldAt(step, profile, time) {
  return Math.max(0, search(profile.times, time / step.unit) - 1);
}

function paintMemory(app) {
  const { pen, width, height } = sized(byId("memory"));
  const { state, colours, report } = app;
  const steps = report.steps.filter((step) => state.shown === "both" || step.name === state.shown);
  const profiles = steps.map((step) => profileOf(step, state.rank));
  const shown = profiles.filter((profile) => profile && profile.times.length);
  const area = { left: GUTTER, top: 20, right: width, bottom: height - 6 };
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  pen.font = "bold 12px Helvetica, Arial, sans-serif";
  pen.fillStyle = colours.ink;
  pen.fillText("memory", 10, 10);
  pen.font = "11px Helvetica, Arial, sans-serif";
  pen.fillStyle = colours.quiet;
  pen.fillText(`of rank ${state.rank}`, 10, 26);
  if (!shown.length) return;
  const peak = Math.max(...shown.map((profile) => profile.totals[profile.peakIndex]));
  const capacity = shown[0].capacity;
  const inside = capacity !== null && peak >= NEAR * capacity;
  const scale = (area.bottom - area.top) / (HEADROOM * Math.max(peak, inside ? capacity : 0, 1));
  paintSizes(pen, area, scale, colours);
  if (profiles[0]) paintStack(app, pen, steps[0], profiles[0], area, scale);
  if (profiles[1]) paintTotal(app, pen, steps[1], profiles[1], area, scale);
  paintCapacity(pen, area, scale, capacity, inside, colours);
  paintCursor(app, pen, width, height);
}

function paintSizes(pen, area, scale, colours) {
  const most = (area.bottom - area.top) / scale;
  const [factor, unit] = SIZES.find(([least]) => most >= 2 * least) || SIZES[SIZES.length - 1];
  const { ticks } = ticksOf(0, most / factor, ((area.bottom - area.top) * 90) / 26);
  pen.textAlign = "right";
  for (const tick of ticks) {
    const y = area.bottom - tick * factor * scale;
    pen.fillStyle = colours.line;
    pen.fillRect(area.left, y, area.right - area.left, 1);
    pen.fillStyle = colours.quiet;
    pen.fillText(`${Number(tick.toPrecision(6))} ${unit}`, area.left - 8, Math.min(y, area.bottom - 5));
  }
}

// One state a pixel: of several that begin in it the fullest, so that no peak is lost.
function statesByPixel(app, step, profile, area, use) {
  const { state } = app;
  const perPixel = (state.to - state.from) / (area.right - area.left) / step.unit;
  let index = heldAt(step, profile, state.from);
  const last = step.length / step.unit;
  for (let x = area.left; x < area.right; x++) {
    const end = state.from / step.unit + (x + 1 - area.left) * perPixel;
    if (end - perPixel > last) return;
    let fullest = index;
    while (index + 1 < profile.times.length && profile.times[index + 1] < end) {
      index += 1;
      if (profile.totals[index] > profile.totals[fullest]) fullest = index;
    }
    use(x, fullest);
  }
}

function paintStack(app, pen, step, profile, area, scale) {
  const colours = app.report.categories.map((category) => category.colour);
  statesByPixel(app, step, profile, area, (x, index) => {
    let bottom = area.bottom;
    profile.usage.forEach((usage, kind) => {
      const height = usage[index] * scale;
      if (height <= 0) return;
      pen.fillStyle = colours[kind];
      pen.fillRect(x, bottom - height, 1, height);
      bottom -= height;
    });
  });
}

function paintTotal(app, pen, step, profile, area, scale) {
  pen.strokeStyle = app.colours.ink;
  pen.lineWidth = 1.6;
  pen.beginPath();
  statesByPixel(app, step, profile, area, (x, index) => pen.lineTo(x, area.bottom - profile.totals[index] * scale));
  pen.stroke();
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.fillStyle = app.colours.ink;
  pen.fillText("line: measured, in a step of its own", area.right - 8, 8);
}

function paintCapacity(pen, area, scale, capacity, inside, colours) {
  if (capacity === null) return;
  const y = inside ? area.bottom - capacity * scale : area.top;
  pen.textAlign = "left";
  pen.fillStyle = colours.ink;
  const words = `usable ${formatSize(capacity)}${inside ? "" : " (above this axis)"}`;
  pen.fillText(words, area.left + 6, inside ? Math.max(y - 8, 7) : 8);
  if (!inside) return;
  pen.strokeStyle = colours.over;
  pen.lineWidth = 1.5;
  pen.setLineDash([6, 4]);
  pen.beginPath();
  pen.moveTo(area.left, Math.round(y) + 0.5);
  pen.lineTo(area.right, Math.round(y) + 0.5);
  pen.stroke();
  pen.setLineDash([]);
  pen.lineWidth = 1;
}
