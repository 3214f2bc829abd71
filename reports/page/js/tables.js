// The parts of the report beside the timeline: plan, search, explanation, difference.

function tableOf(heads, rows) {
  const cell = (tag, value, i) => element(tag, heads[i].number ? { class: "number" } : {}, value);
  const head = element("tr", {}, ...heads.map((of, i) => cell("th", of.name, i)));
  return element("table", { class: "wide-table" }, head, ...rows.map((row) => element("tr", {}, ...row.map((value, i) => cell("td", value, i)))));
}

const text = (name) => ({ name });
const number = (name) => ({ name, number: true });

function stackOf(parts, whole, wide) {
  const bar = element("div", { class: wide ? "stack wide" : "stack" });
  parts.forEach(([name, value, colour]) => {
    const piece = element("span", { title: name });
    piece.style.width = `${Math.min(100, (100 * value) / whole)}%`;
    piece.style.background = colour;
    bar.append(piece);
  });
  return bar;
}

function showLayout(app) {
  const { report } = app;
  const parts = [element("h2", {}, "What a device does in a step, on average"), ...deviceTime(app)];
  parts.push(element("h2", {}, "Stages, each at its peak of memory"), memoryKey(report), stageTable(report));
  if (report.links.length) {
    const heads = [text("link"), number("how many"), number("bandwidth"), number("bytes a step"), number("utilisation")];
    parts.push(element("h2", {}, "Busiest links, one of each kind"), tableOf(heads, report.links));
  }
  if (report.assumptions.length) {
    parts.push(element("h2", {}, "What the prediction rests on"), element("ul", {}, ...report.assumptions.map((of) => element("li", {}, of))));
  }
  byId("layout").replaceChildren(...parts);
}

function deviceTime(app) {
  const { report, colours } = app;
  const colour = (name) => {
    const kind = report.kinds.find((of) => of.name === name);
    return kind ? colourOf(kind, 0, colours.dark) : colours.line;
  };
  const whole = report.device_time.reduce((sum, [, seconds]) => sum + seconds, 0);
  const bar = stackOf(report.device_time.map(([name, seconds]) => [name, seconds, colour(name)]), whole, true);
  const keys = report.device_time.map(([name, seconds]) => element("span", { class: "key" }, swatch(colour(name)), `${name} ${formatTime(seconds)} (${formatPercent(seconds / whole)})`));
  return [bar, element("p", {}, ...keys)];
}

function memoryKey(report) {
  return element("p", {}, ...report.categories.map(({ name, colour }) => element("span", { class: "key" }, swatch(colour), name)));
}

function stageTable(report) {
  const heads = [text("stage"), text("layers"), number("ranks"), text(""), ...report.categories.map((of) => number(of.name)), number("peak"), number("of usable"), text("fits")];
  const host = report.stages.some((of) => of.host > 0);
  if (host) heads.push(number("whole host"));
  const most = Math.max(...report.stages.map((of) => of.peak));
  const rows = report.stages.map((of) => {
    const limit = of.capacity || most;
    const bar = stackOf(of.sizes.map((size, i) => [report.categories[i].name, size, report.categories[i].colour]), Math.max(limit, of.peak), false);
    const fits = of.capacity === null || of.peak <= of.capacity;
    const verdict = element("span", fits ? {} : { class: "over" }, fits ? "yes" : "no");
    const cells = [of.name, of.blocks, formatCount(of.ranks), bar, ...of.sizes.map((size) => (size ? formatSize(size) : "–")), formatSize(of.peak), of.capacity ? formatPercent(of.peak / of.capacity) : "–", verdict];
    return host ? [...cells, of.host ? formatSize(of.host) : "–"] : cells;
  });
  return tableOf(heads, rows);
}

function showSearch(app) {
  const { searches } = app.report;
  if (!searches.length) return;
  const heads = [text("algorithm"), number("best step time"), number("lower bound"), text("gap"), number("evaluations"), number("time"), text("plan")];
  const rows = searches.map((of) => [
    element("span", {}, swatch(of.colour), of.algorithm), of.step_time === null ? "none fits" : formatTime(of.step_time), of.bound ? formatTime(of.bound) : "–", of.gap,
    formatCount(of.evaluations), formatTime(of.wall_time), of.plan,
  ]);
  byId("search").replaceChildren(
    element("h2", {}, "Best step time so far"),
    element("div", { class: "charts" }, element("canvas"), element("canvas")),
    element("h2", {}, searches.length > 1 ? "Algorithms" : "Algorithm"), tableOf(heads, rows),
  );
}

function showExplanation(app) {
  const parts = app.report.explanation.flatMap(({ heading, lines }) => [element("h2", {}, heading), element("pre", {}, lines.join("\n"))]);
  byId("explanation").replaceChildren(...parts);
}

function showDifference(app) {
  const found = app.report.difference;
  if (!found) return;
  const signed = (seconds) => `${seconds < 0 ? "−" : "+"}${formatTime(Math.abs(seconds))}`;
  const heads = [text("operation"), text("kind"), number("predicted"), number("measured"), number("costs the step"), number("of its error"), text("")];
  const rows = found.rows.map(([kind, operation, before, after, cost, share, verdict]) => [operation, kind, formatTime(before), formatTime(after), signed(cost), `${Math.round(100 * share)} %`, verdict]);
  byId("difference").replaceChildren(
    element("h2", {}, `From ${formatTime(found.predicted)} predicted to ${formatTime(found.measured)} measured: a mean rank's seconds, operation by operation`),
    element("p", { class: "quiet" }, `Operations were measured under the profiler; steps without it took ${formatTime(found.timed)}. What the operations cost adds up to the error of the step.`),
    tableOf(heads, rows),
  );
}
