// Drawing spans: as bars where they are wide enough, and as shares of each pixel's time where they are not.

const GUTTER = 168;
const READABLE = 14; // pixels of a span on average, below which whole passes are drawn

// The canvas at the screen's own resolution, as wide as the lanes are beside their scroll bar.
function sized(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const scroller = byId("scroller");
  const timed = canvas.closest("#plot") !== null;
  const width = timed ? scroller.clientWidth : canvas.clientWidth;
  const height = canvas.id === "lanes" ? scroller.clientHeight : canvas.parentElement.id === "plot" ? canvas.clientHeight : 360;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  if (timed) {
    canvas.style.width = `${width}px`;
    if (canvas.id === "lanes") canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { pen, width, height };
}

function theme() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "panel", "ink", "quiet", "line", "idle", "accent", "over"];
  const colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return { ...colours, dark: window.matchMedia("(prefers-color-scheme: dark)").matches };
}

function colourOf(kind, chunk, dark) {
  const shades = dark ? kind.dark : kind.light;
  return shades[Math.min(chunk || 0, shades.length - 1)];
}

function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.3 * red + 0.59 * green + 0.11 * blue < 140 ? "#ffffff" : "#1a1a1a";
}

// What one row of a lane is drawn with: seconds to pixels, and which kinds are hidden.
function brush(app, step, pen, width) {
  const { state, report, colours } = app;
  const scale = (width - GUTTER) / (state.to - state.from);
  return {
    pen, step, right: width, scale: scale * step.unit, offset: GUTTER - state.from * scale,
    kinds: report.kinds, hidden: report.kinds.map((kind) => state.hidden.has(kind.name)), dark: colours.dark,
    low: state.from / step.unit, high: state.to / step.unit, fonts: ["11px Helvetica, Arial, sans-serif", "9px Helvetica, Arial, sans-serif"],
  };
}

function paintSlice(tool, of, slice, box) {
  const spans = tool.step.spans;
  const fine = { spans, first: slice.first, from: slice.first + search(slice.reach, tool.low), label: operatorLabel };
  fine.to = firstAfter(spans.start, slice.first, slice.end, tool.high);
  const crowded = (fine.to - fine.from) * READABLE > tool.right - GUTTER;
  if (!slice.passes || !crowded) return paintSpans(tool, of, fine, box);
  const coarse = { spans: slice.passes, from: search(slice.passes.reach, tool.low), label: passLabel };
  coarse.to = firstAfter(slice.passes.start, 0, slice.passes.start.length, tool.high);
  return paintSpans(tool, of, coarse, box);
}

function firstAfter(values, first, end, limit) {
  let [low, high] = [first, end];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle;
    else low = middle + 1;
  }
  return low;
}

function paintSpans(tool, of, { spans, from, to, label }, box) {
  const shares = { pixel: -1, time: new Float64Array(tool.kinds.length), chunk: new Uint8Array(tool.kinds.length) };
  for (let i = from; i < to; i++) {
    const kind = spans.kind[i];
    if (tool.hidden[kind]) continue;
    const chunk = tool.step.chunkOf[of].get(spans.stage[i]) || 0;
    const left = tool.offset + spans.start[i] * tool.scale;
    const right = left + spans.duration[i] * tool.scale;
    if (right - left < 1) {
      addShare(tool, shares, kind, chunk, Math.max(left, GUTTER), right, box);
      continue;
    }
    flushShares(tool, shares, box);
    paintBar(tool, spans, i, { kind, chunk, left: Math.max(left, GUTTER), right: Math.min(right, tool.right) }, label, box);
  }
  flushShares(tool, shares, box);
}

function addShare(tool, shares, kind, chunk, left, right, box) {
  for (let pixel = Math.floor(left); pixel < right; pixel++) {
    if (pixel !== shares.pixel) {
      flushShares(tool, shares, box);
      shares.pixel = pixel;
    }
    shares.time[kind] += Math.min(right, pixel + 1) - Math.max(left, pixel);
    shares.chunk[kind] = chunk;
  }
}

// Heights of one pixel's kinds are their shares of its time, from the bottom up.
function flushShares(tool, shares, box) {
  if (shares.pixel < 0) return;
  let bottom = box.top + box.height;
  for (let kind = 0; kind < shares.time.length; kind++) {
    if (!shares.time[kind]) continue;
    const height = Math.min(shares.time[kind], 1) * box.height;
    tool.pen.fillStyle = colourOf(tool.kinds[kind], shares.chunk[kind], tool.dark);
    tool.pen.fillRect(shares.pixel, bottom - height, 1, height);
    bottom -= height;
    shares.time[kind] = 0;
  }
  shares.pixel = -1;
}

function paintBar(tool, spans, i, bar, label, box) {
  const { pen } = tool;
  const width = bar.right - bar.left;
  const colour = colourOf(tool.kinds[bar.kind], bar.chunk, tool.dark);
  pen.fillStyle = colour;
  pen.fillRect(bar.left, box.top, width > 3 ? width - 0.6 : width, box.height);
  const again = spans.recompute ? spans.recompute[i] / spans.duration[i] : 0;
  if (again) {
    const recompute = tool.kinds.find((kind) => kind.name === "recompute");
    pen.fillStyle = colourOf(recompute, 0, tool.dark);
    const height = Math.max(2, box.height * again);
    pen.fillRect(bar.left, box.top + box.height - height, width > 3 ? width - 0.6 : width, height);
  }
  if (width < 8 || box.height < 11) return;
  const text = label(tool, spans, i, width);
  const font = tool.fonts.find((each) => {
    pen.font = each;
    return pen.measureText(text).width <= width - 1;
  });
  if (!text || !font) return;
  pen.fillStyle = inkOn(colour);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(text, bar.left + width / 2, box.top + (box.height * (1 - again)) / 2 + 0.5);
}

function passLabel(tool, spans, i) {
  return spans.microbatch[i] >= 0 ? String(spans.microbatch[i]) : tool.kinds[spans.kind[i]].name;
}

function operatorLabel(tool, spans, i, width) {
  const name = tool.step.spans.names[spans.operators[i]];
  const room = Math.floor((width - 6) / 6.2);
  if (!name) return passLabel(tool, spans, i);
  if (name.length <= room) return name;
  const short = name.split(": ").pop();
  return short.length <= room ? short : "";
}
