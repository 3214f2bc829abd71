// Lanes: one for each pipeline rank's stages, and below it, where it is open, one for each of its ranks.

const LANE = { least: 26, most: 120, rank: 26, gap: 5 };

// Ranks by the stages that they hold; each group knows how many kinds of ranks the step has there.
function groupsOf(step) {
  const groups = new Map();
  step.classes.forEach((of, index) => {
    const key = of.stages.join(",");
    if (!groups.has(key)) groups.set(key, { stages: of.stages, classes: [], ranks: [] });
    groups.get(key).classes.push(index);
    groups.get(key).ranks = groups.get(key).ranks.concat(step.ranksOf[index]);
  });
  const found = [...groups.values()];
  for (const group of found) group.ranks.sort((a, b) => a - b);
  return found;
}

function stagesText(stages) {
  if (!stages.length) return "ranks";
  const shown = stages.length <= 3 ? stages.join(", ") : `${stages[0]}, … ${stages[stages.length - 1]}`;
  return `${stages.length === 1 ? "stage" : "stages"} ${shown}`;
}

// The ranks that a closed group shows: one of each kind, up to four, and the chosen one.
function shownRanks(step, group, chosen) {
  const kinds = group.classes.slice(0, 4).map((of) => (step.classOf[chosen] === of ? chosen : step.ranksOf[of][0]));
  return kinds.includes(chosen) || !group.ranks.includes(chosen) ? kinds : [...kinds, chosen];
}

function layLanes(report, groups, state, height) {
  const steps = report.steps.filter((step) => state.shown === "both" || step.name === state.shown);
  const lanes = [];
  groups.forEach((group, index) => {
    const open = state.open.has(index);
    const few = steps.some((step) => step.name === "measured") && group.ranks.length <= 16;
    const heads = few ? group.ranks : shownRanks(report.steps[0], group, state.rank);
    const add = (rank, head) => steps.forEach((step, i) => lanes.push({ group, index, rank, step, head: head && i === 0, big: true, opens: !few && group.ranks.length > 1 }));
    heads.forEach((rank, place) => add(rank, place === 0));
    if (open && !few) group.ranks.forEach((rank) => lanes.push({ group, index, rank, step: steps[0], big: false }));
  });
  const big = lanes.filter((lane) => lane.big).length;
  const fitting = Math.floor(height / Math.max(big, 1));
  const tall = Math.min(Math.max(fitting, LANE.least), LANE.most);
  let top = 0;
  for (const lane of lanes) {
    lane.top = top;
    lane.height = lane.big ? tall : LANE.rank;
    top += lane.height;
  }
  return { lanes, height: top };
}

// Where rows of a lane lie: compute is tall, the others are strips below it; strips that would be too low are left out.
function rowsOf(lane) {
  const room = lane.height - (lane.big ? LANE.gap : 4);
  const strips = lane.step.rows.filter((row) => row !== COMPUTE_ROW);
  const strip = Math.min(13, Math.floor(((lane.big ? 0.5 : 0.45) * room) / Math.max(strips.length, 1)) - 1);
  const shown = strip >= 2 ? strips : [];
  const compute = room - shown.length * (strip + 1);
  const rows = [{ row: COMPUTE_ROW, top: lane.top + 2, height: compute }];
  shown.forEach((row, i) => rows.push({ row, top: lane.top + 3 + compute + i * (strip + 1), height: strip }));
  return rows;
}
