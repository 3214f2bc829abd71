// The chosen rank beside the timeline: who it is, what it runs at a moment, and what it holds then.

function factTable(facts) {
  return element("table", {}, ...facts.map(([name, value]) => element("tr", {}, element("td", { class: "quiet" }, name), element("td", { class: "number" }, value))));
}

function showInspector(app) {
  const { report, state } = app;
  const parts = [element("h3", {}, `Rank ${state.rank}`), identity(report, state.rank)];
  const steps = report.steps.filter((step) => state.shown === "both" || step.name === state.shown);
  for (const step of steps) {
    const profile = profileOf(step, state.rank);
    const name = steps.length > 1 ? `${step.name}: ` : "";
    const peak = profile && profile.times.length ? profile.times[profile.peakIndex] * step.unit : 0;
    const time = state.at === null ? peak : state.at;
    if (time > step.length) continue;
    parts.push(element("h3", {}, state.at === null ? `${name}at its peak, ${formatTime(time, 5)}` : `${name}at ${formatTime(time, 5)}`));
    const measured = step.source.startsWith("measured"); // memory and spans are then of different steps
    if (!measured || state.at !== null) parts.push(element("p", {}, runningText(app, step, state.rank, time)));
    if (measured) parts.push(element("p", { class: "quiet" }, "Memory was measured in a step of its own."));
    if (profile && profile.times.length) parts.push(heldTable(app, step, profile, time));
  }
  if (state.at === null) parts.push(element("p", { class: "quiet" }, "Click on the timeline for another moment."));
  byId("inspector").replaceChildren(...parts);
}

function identity(report, rank) {
  const step = report.steps[0];
  const of = step.classOf[rank];
  const facts = [["holds", stagesText(step.classes[of].stages)]];
  for (const axis of report.mesh) facts.push([axis.name, `${Math.floor(rank / axis.stride) % axis.size} of ${axis.size}`]);
  facts.push(["device", formatCount(report.devices[rank])], ["node", formatCount(report.nodes[rank])]);
  facts.push(["ranks alike", formatCount(step.ranksOf[of].length)]);
  return factTable(facts);
}

function runningText(app, step, rank, time) {
  const found = step.rows.map((row) => [row, spanAt(step, rank, row, time, 0)]).filter(([, of]) => of);
  if (!found.length) return "Nothing runs.";
  return found
    .map(([, { index }]) => {
      const { spans } = step;
      const microbatch = spans.microbatch[index] >= 0 ? ` of microbatch ${spans.microbatch[index]}` : "";
      const name = spans.names[spans.operators[index]];
      return `${app.report.kinds[spans.kind[index]].name}${microbatch}${name ? `: ${name}` : ""}`;
    })
    .join("; ");
}

function heldTable(app, step, profile, time) {
  const index = heldAt(step, profile, time);
  const rows = app.report.categories.map(({ name, colour }, kind) =>
    element("tr", {}, element("td", {}, swatch(colour), name), element("td", { class: "number" }, formatSize(profile.usage[kind][index]))),
  );
  const total = profile.totals[index];
  const over = profile.capacity !== null && total > profile.capacity;
  const share = profile.capacity ? ` (${formatPercent(total / profile.capacity)})` : "";
  const sum = element("td", { class: over ? "number over" : "number" }, `${formatSize(total)}${share}`);
  rows.push(element("tr", {}, element("td", {}, "in all"), sum));
  if (profile.capacity !== null) rows.push(element("tr", {}, element("td", { class: "quiet" }, "usable"), element("td", { class: "number" }, formatSize(profile.capacity))));
  return element("table", { id: `held-${step.name}` }, ...rows.reverse());
}
