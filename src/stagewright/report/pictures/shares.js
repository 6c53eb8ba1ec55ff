// Bars next to each other: the model as its stages cut it, and the memory of each rank by category below its capacity.

const HUES = ["#3a6fd8", "#2f9461", "#c98a12", "#a04fc4", "#1591a3", "#d0573f", "#7b8494", "#8c6d46", "#5b6472"];

function block(share, hue, label, details, title) {
  const node = made("div", "block", label);
  node.append(made("span", "", details));
  Object.assign(node.style, { flexGrow: share, background: hue });
  node.title = title;
  return node;
}

/** One block per stage, as wide as one microbatch takes on it, in the colour of its rank. */
function drawPartition() {
  const table = tableOf("stages");
  if (!table) return;
  const [ranks, starts, does] = ["rank", "starts at", "saved values"].map((name) => valuesOf(table, name));
  const times = ["F", "I", "W", "R"].map((name) => valuesOf(table, name)), bytes = valuesOf(table, "parameters");
  const whole = times.flat().reduce((sum, each) => sum + each, 0) || 1; // shares below 1 in all would not fill the row
  const isDense = ranks.length > 32, strip = made("div", isDense ? "strip dense" : "strip");
  ranks.forEach((rank, stage) => {
    const seconds = times.reduce((sum, each) => sum + each[stage], 0);
    const words = `stage ${stage} on rank ${rank}\nfrom ${starts[stage]}\n${formatSeconds(seconds)} a microbatch\n` +
      `${formatBytes(bytes[stage])} of parameters\n${does[stage]}`;
    const details = `\n${formatSeconds(seconds, 3)}\n${formatBytes(bytes[stage])}\n${does[stage]}`, hue = HUES[rank % HUES.length];
    strip.append(block((1000 * seconds) / whole || 1e-3, hue, ...(isDense ? ["", ""] : [`${stage}`, details]), words));
  });
  const what = isDense ? `The ${ranks.length} stages of the model` : "The model and its cuts";
  panel(`${what}: width is the time of a microbatch, colour the rank`).append(strip);
}

/** One bar per rank, against the largest capacity unless that dwarfs what is held; the mark is what its device has. */
function drawMemory() {
  const table = tableOf("memory");
  if (!table) return;
  const [ranks, room, held, live] = ["rank", "capacity", "reserved", "allocated"].map((name) => valuesOf(table, name));
  const fullest = Math.max(...held), largest = Math.max(...room.map((each) => each ?? 0)), first = 5;
  const isFar = largest > 5 * fullest, most = isFar ? fullest : Math.max(largest, fullest);
  const limit = isFar ? `far below the ${formatBytes(largest)} of a device` : "the line is what its device has";
  const section = panel(`Memory at the peak of each rank: allocated, by category, and reserved (grey); ${limit}`), key = made("p", "key");
  const names = table.columns.slice(first).map(({ name }) => name);
  fillKey(key, names);
  section.append(key);
  table.rows.forEach((row, at) => {
    const line = made("div", "bar"), bar = made("div", "track");
    row.slice(first).forEach((size, i) => {
      const part = made("div");
      Object.assign(part.style, { width: `${(100 * size) / most}%`, background: page.categoryFills[names[i]] });
      part.title = `${names[i]}: ${formatBytes(size)}`;
      bar.append(part);
    });
    const lost = made("div", "lost");
    lost.style.width = `${(100 * Math.max(0, held[at] - live[at])) / most}%`;
    lost.title = `reserved, not allocated: ${formatBytes(held[at] - live[at])}`;
    bar.append(lost);
    if (room[at] !== null && !isFar) {
      const mark = made("u");
      mark.style.left = `${(100 * room[at]) / most}%`;
      mark.title = `capacity: ${formatBytes(room[at])}`;
      bar.append(mark);
    }
    line.append(made("span", "", `rank ${ranks[at]}`), bar, made("span", "", formatBytes(held[at])));
    section.append(line);
  });
}

if (report) {
  drawSummary();
  drawPartition();
  drawMemory();
  report.tables.forEach(drawTable);
}
