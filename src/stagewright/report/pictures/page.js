"use strict";
const page = JSON.parse(document.getElementById("data").textContent);
const element = (id) => document.getElementById(id);
/** The timeline that is drawn: the first, or another that the address names. */
const named = decodeURIComponent(globalThis.location?.hash.slice(1) ?? "");
const data = Object.hasOwn(page.others, named) ? page.others[named] : page;

/** The numbers of the page, which lie compressed in it. */
async function inflate(text) {
  if (!globalThis.DecompressionStream) {
    element("subtitle").textContent = "This page needs a browser of 2023 or later.";
    throw new Error("DecompressionStream is missing");
  }
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

const TYPES = { i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const numbers = await inflate(page.columns);

/** A column of numbers; where it has runs, each number of a run was told as the step from the one before. */
function unpack({ at, count, type, runs }) {
  const stored = new TYPES[type](numbers, at, count);
  if (!runs) return stored;
  const whole = new (type === "f4" ? Float64Array : TYPES[type])(count);
  runs.forEach((first, run) => {
    for (let i = first, sum = 0; i < (runs[run + 1] ?? count); i++) whole[i] = sum += stored[i];
  });
  return whole;
}

const unpackAll = (columns) => Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, unpack(column)]));

const bars = unpackAll(data.bars);
const moves = unpackAll(data.transfers);
const curves = data.curves.map(({ time, held, parts, peak }) => ({
  time: unpack(time), held: held ? unpack(held) : total(parts, time.count), peak,
}));

/** The bytes of a category at a moment; it is a number, or a column where it changes. */
function bytesOf(part) {
  const values = typeof part === "number" ? null : unpack(part);
  return values ? (i) => values[i] : () => part;
}

/** The sum of all categories. */
function total(parts, count) {
  const sum = new Float64Array(count);
  for (const bytesAt of Object.values(parts).map(bytesOf)) for (let i = 0; i < count; i++) sum[i] += bytesAt(i);
  return sum;
}

const numRanks = curves.length;
const peaks = curves.map((curve) => curve.peak);
const fullest = peaks.indexOf(Math.max(...peaks));
const hasLanes = data.laneOffsets.some((offset, i) => i % 2 && offset < data.laneOffsets[i + 1]);

// -- units --------------------------------------------------------------------------------------------------

function formatSeconds(seconds, digits = 4) {
  const size = Math.abs(seconds);
  if (size === 0) return "0";
  if (size >= 1) return `${+seconds.toPrecision(digits)} s`;
  if (size >= 1e-3) return `${+(seconds * 1e3).toPrecision(digits)} ms`;
  return `${+(seconds * 1e6).toPrecision(digits)} us`;
}

function formatBytes(count) {
  for (const [scale, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (Math.abs(count) >= scale) return `${+(count / scale).toPrecision(4)} ${unit}`;
  return `${Math.round(count)} B`;
}

const formatHeld = (held) => (data.curvesAreBytes ? formatBytes(held) : `${held}`);

function byteTicks(most, count) {
  const step = 2 ** Math.ceil(Math.log2(most / count));
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, n) => n * step);
}

function ticks(from, to, most) {
  const rough = (to - from) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9));
  const found = [];
  for (let n = Math.ceil(from / step - 1e-9); n * step <= to * (1 + 1e-12); n++) found.push(n * step);
  return found;
}

// -- layout -------------------------------------------------------------------------------------------------

const view = { from: 0, to: data.makespan || 1 };
const rowHeight = Math.min(38, Math.max(8, 620 / numRanks - 4));
const laneHeight = hasLanes ? Math.max(3, rowHeight / 5) : 0;
const gap = rowHeight > 14 ? 5 : 2;
const pitch = rowHeight + laneHeight + gap;
const namedRanks = Math.max(1, Math.ceil(12 / pitch)); // every so many ranks there is room for a name
const left = 22 + 7 * `rank ${numRanks - 1}`.length + (data.curvesAreBytes ? 14 : 0), right = 26, head = 4, axis = 26;
const heights = { rows: head + numRanks * pitch + axis, curves: Object.keys(data.curves[0].parts).length ? 230 : 150 };
let hovered = -1, hoveredRank = -1, chosenRank = fullest, followed = -1, cursor = null, theme = null;

let width = element("rows").clientWidth; // of both canvases; kept because asking for it lays out the page
const plotWidth = () => width - left - right;
const xOf = (seconds) => left + ((seconds - view.from) / (view.to - view.from)) * plotWidth();
const secondsAt = (x) => view.from + ((x - left) / plotWidth()) * (view.to - view.from);

function canvas(id) {
  const target = element(id), ratio = window.devicePixelRatio || 1;
  width = target.clientWidth;
  target.style.height = `${heights[id]}px`;
  if (target.width !== Math.round(width * ratio) || target.height !== Math.round(heights[id] * ratio)) {
    target.width = Math.round(width * ratio);
    target.height = Math.round(heights[id] * ratio);
  }
  const pen = prepared(target.getContext("2d"));
  pen.clearRect(0, 0, width, heights[id]);
  return pen;
}

function prepared(pen) {
  const ratio = window.devicePixelRatio || 1;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.font = "12px Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";
  return pen;
}

/** Draw what changes only with the view; pointing at something draws on top of it. */
function drawBackground(pen, id, more, draw) {
  const key = [view.from, view.to, theme.name, ...more];
  const background = layer(id, key, element(id), (layerPen) => draw(prepared(layerPen)));
  pen.drawImage(background, 0, 0, width, heights[id]);
}

// -- the timetable ------------------------------------------------------------------------------------------

function firstWhere(begin, end, isReached) {
  while (begin < end) {
    const middle = (begin + end) >> 1;
    if (isReached(middle)) end = middle;
    else begin = middle + 1;
  }
  return begin;
}

/** Computations of a rank do not overlap, so their ends are in the order of their starts. */
const firstVisible = (begin, end) => firstWhere(begin, end, (i) => bars.start[i] + bars.seconds[i] >= view.from);
const firstBeyond = (begin, end) => firstWhere(begin, end, (i) => bars.start[i] > view.to);

function barBox(i, rank, beside) {
  const x = xOf(bars.start[i]), width = (bars.seconds[i] / (view.to - view.from)) * plotWidth();
  const [y, height] = laneBox(rank, beside);
  if (beside || !bars.half[i]) return [x, y, width, height];
  return [x, y + ((bars.half[i] - 1) * height) / 2, width, height / 2];
}

function drawLane(pen, rank, beside) {
  const lane = 2 * rank + (beside ? 1 : 0), end = firstBeyond(data.laneOffsets[lane], data.laneOffsets[lane + 1]);
  const begin = beside ? data.laneOffsets[lane] : firstVisible(data.laneOffsets[lane], end);
  const numColumns = Math.round(plotWidth() * (window.devicePixelRatio || 1));
  if (WIDE * (end - begin) <= numColumns) {
    for (let i = begin; i < end; i++) drawBar(pen, i, rank, beside);
  } else {
    const wide = [], [y, height] = laneBox(rank, beside);
    paintColumns(pen, columnsOf(begin, end, numColumns, wide), y, height);
    for (const i of wide) drawBar(pen, i, rank, beside);
  }
  pen.globalAlpha = 1;
}

function laneBox(rank, beside) {
  const y = head + rank * pitch;
  return beside ? [y + rowHeight + 1, laneHeight - 1] : [y, rowHeight];
}

function followPath() {
  followed = followed === PATH ? -1 : PATH;
  redraw();
}

function drawBar(pen, i, rank, beside) {
  const [x, y, width, height] = barBox(i, rank, beside);
  if (x + width < left) return;
  const from = Math.max(x, left), to = Math.min(x + width, left + plotWidth());
  pen.globalAlpha = strengthOf(i);
  pen.fillStyle = data.kinds[bars.kind[i]].fills[bars.chunk[i]];
  pen.fillRect(from, y, Math.max(to - from - (width > 4 ? 0.8 : 0), 0.7), height);
  if (!beside && width > 9 && height > 9) drawLabel(pen, i, from, to, y, height);
}

function barText(i) {
  const microbatch = bars.microbatch[i] < 0 ? "" : bars.microbatch[i];
  return `${bars.stage[i]}${data.kinds[bars.kind[i]].text}${microbatch}`;
}

const widths = {}; // of texts, in pixels
function drawLabel(pen, i, from, to, y, height) {
  const text = barText(i), short = text.replace(/^\d+/, "");
  const wanted = [data.numChunks > 1 ? text : short, `${bars.microbatch[i]}`];
  // all kinds as wide as the widest, so that equal bars get labels of one form
  const widthOf = (each) => (widths[each] ??= pen.measureText(each.replace(/[A-Z]/, "W")).width);
  const fitting = wanted.find((each) => widthOf(each) < to - from - 3);
  if (fitting === undefined || bars.microbatch[i] < 0) return;
  pen.fillStyle = data.inks[bars.chunk[i]];
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.fillText(fitting, (from + to) / 2, y + height / 2 + 0.5);
}

// Lines across the rows of other ranks are drawn only for a microbatch that is followed.
function isBetweenNeighbours(i) {
  return Math.abs(data.rankOfStage[moves.source[i]] - data.rankOfStage[moves.target[i]]) === 1;
}

const endOf = (move) => moves.start[move] + moves.seconds[move];

const MOST_LINES = 600; // more cannot be told apart
function drawTransfers(pen) {
  const chosen = [];
  for (let i = 0; i < moves.start.length && chosen.length <= MOST_LINES; i++) {
    const isInView = moves.start[i] <= view.to && endOf(i) >= view.from;
    if (isInView && (followed < 0 ? isBetweenNeighbours(i) : followed === moves.microbatch[i])) chosen.push(i);
  }
  if (chosen.length > MOST_LINES) return;
  pen.lineWidth = followed < 0 ? 1 : 2;
  for (const i of chosen) {
    const isValue = moves.source[i] < moves.target[i];
    const [y, to] = [data.rankOfStage[moves.source[i]], data.rankOfStage[moves.target[i]]].map(
      (rank) => head + rank * pitch + rowHeight / 2,
    );
    const edge = (Math.sign(to - y) * rowHeight) / 2;
    pen.strokeStyle = isValue ? theme.value : theme.gradient;
    pen.globalAlpha = 0.85;
    pen.beginPath();
    pen.moveTo(xOf(moves.start[i]), y + edge);
    pen.lineTo(xOf(endOf(i)), to - edge);
    pen.stroke();
  }
  pen.globalAlpha = 1;
}

function drawAxis(pen, y) {
  pen.textBaseline = "alphabetic";
  pen.textAlign = "center";
  for (const tick of ticks(view.from, view.to, Math.max(2, plotWidth() / 110))) {
    const x = xOf(tick);
    pen.fillStyle = theme.faint;
    pen.fillRect(x, y, 1, 5);
    pen.fillText(formatSeconds(tick, 6), x, y + 19);
  }
}

function drawRankName(pen, rank, colour) {
  pen.fillStyle = colour;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  pen.fillText(`rank ${rank}`, left - 10, head + rank * pitch + rowHeight / 2);
}

function drawAllRows(pen) {
  for (let rank = 0; rank < numRanks; rank++) {
    pen.fillStyle = theme.idle;
    pen.fillRect(left, head + rank * pitch, plotWidth(), rowHeight);
    if (rank % namedRanks === 0) drawRankName(pen, rank, theme.faint);
    drawLane(pen, rank, false);
    drawLane(pen, rank, true);
  }
  clipToRows(pen);
  drawTransfers(pen);
  pen.restore();
  drawAxis(pen, head + numRanks * pitch);
}

function clipToRows(pen) {
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, plotWidth(), head + numRanks * pitch);
  pen.clip();
}

function drawRows() {
  const pen = canvas("rows");
  drawBackground(pen, "rows", [followed], drawAllRows);
  if (hoveredRank >= 0 && hoveredRank % namedRanks === 0) drawRankName(pen, hoveredRank, theme.text);
  if (hovered >= 0) {
    clipToRows(pen);
    pen.strokeStyle = theme.text;
    pen.lineWidth = 2;
    pen.strokeRect(...barBox(hovered, hoveredRank, isBeside(hovered, hoveredRank)));
    pen.restore();
  }
  drawCursor(pen, head + numRanks * pitch);
}

function drawCursor(pen, height) {
  if (cursor === null || cursor < view.from || cursor > view.to) return;
  pen.globalAlpha = 0.5;
  pen.fillStyle = theme.text;
  pen.fillRect(xOf(cursor), 0, 1, height);
  pen.globalAlpha = 1;
}

// -- what every rank holds ----------------------------------------------------------------------------------

function indexAt(curve, seconds) {
  return Math.max(firstWhere(0, curve.time.length, (i) => curve.time[i] > seconds) - 1, 0);
}

const heldAt = (rank, seconds) => curves[rank].held[indexAt(curves[rank], seconds)];

const shownRank = () => (hoveredRank < 0 ? chosenRank : hoveredRank);

/** What each category of a rank holds, from the lowest in the picture to the highest: `[name, bytes at a moment]`. */
let unpacked = { rank: -1, parts: [] }; // of one rank, as those of all take room
function partsOf(rank) {
  if (unpacked.rank !== rank) {
    const parts = Object.entries(data.curves[rank].parts).map(([name, part]) => [name, bytesOf(part)]);
    unpacked = { rank, parts };
  }
  return unpacked.parts;
}

/** What is drawn of a curve, `[x, moment]`: of all within half a pixel the highest moment and the last; at one instant
 * what goes, goes first. */
function stepsOf({ time, held }) {
  let i = indexAt({ time }, view.from);
  const steps = [[left, i]];
  for (i++; i < time.length && time[i] <= view.to; ) {
    const x = xOf(time[i]), column = Math.floor(x * 2);
    let highest = i;
    for (; i < time.length && Math.floor(xOf(time[i]) * 2) === column; i++) if (held[i] > held[highest]) highest = i;
    steps.push([x, highest]);
    if (highest !== i - 1) steps.push([Math.min(x + 0.5, left + plotWidth()), i - 1]);
  }
  return steps;
}

function tracePath(pen, steps, heightOf) {
  let height = heightOf(steps[0][1]);
  pen.moveTo(left, height);
  for (const [x, i] of steps) {
    pen.lineTo(x, height);
    height = heightOf(i);
    pen.lineTo(x, height);
  }
  pen.lineTo(left + plotWidth(), height);
}

/** Each category on top of those before it: the area below all of them is painted over by the areas below fewer. */
function drawParts(pen, rank, steps, yOf) {
  const list = partsOf(rank);
  for (let last = list.length; last > 0; last--) {
    const below = list.slice(0, last);
    pen.fillStyle = page.categoryFills[below[last - 1][0]];
    pen.beginPath();
    tracePath(pen, steps, (i) => yOf(below.reduce((sum, [, bytesAt]) => sum + bytesAt(i), 0)));
    pen.lineTo(left + plotWidth(), yOf(0));
    pen.lineTo(left, yOf(0));
    pen.fill();
  }
}

function drawGrid(pen, most, yOf) {
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const tick of data.curvesAreBytes ? byteTicks(most, 4) : ticks(0, most, 4)) {
    pen.fillStyle = theme.grid;
    pen.fillRect(left, yOf(tick), plotWidth(), 1);
    pen.fillStyle = theme.faint;
    pen.fillText(formatHeld(tick), left - 8, yOf(tick));
  }
}

function drawOtherCurves(pen, chosen, yOf) {
  const others = curves.map((_, rank) => rank).filter((rank) => rank !== chosen);
  paintCurves(pen, others, yOf, heights.curves, theme.faint, numRanks > 16 ? 0.25 : 0.5);
}

/** A dashed line at so many bytes, such as what the rank may hold. */
function drawLimit(pen, bytes, yOf, dashes) {
  pen.strokeStyle = theme.faint;
  pen.lineWidth = 1;
  pen.setLineDash(dashes);
  pen.beginPath();
  pen.moveTo(left, yOf(bytes));
  pen.lineTo(left + plotWidth(), yOf(bytes));
  pen.stroke();
  pen.setLineDash([]);
}

/** What the allocator of a rank reserves, where the page predicts it. */
function reservedOf(rank) {
  const table = data.curvesAreBytes && page.report?.tables.find(({ key }) => key === "memory");
  return table ? table.rows[rank]?.[table.columns.findIndex(({ name }) => name === "reserved")] : undefined;
}

function drawCurves() {
  const pen = canvas("curves"), held = Math.max(...peaks) || 1, height = heights.curves - 18;
  const isNear = data.capacities.length > 0 && Math.max(...data.capacities) <= 2 * held;
  const most = isNear ? Math.max(held, ...data.capacities) : held;
  const yOf = (held) => 9 + height * (1 - held / most);
  const chosen = shownRank();
  drawBackground(pen, "curves", [chosen], (layerPen) => {
    drawGrid(layerPen, most, yOf);
    const steps = stepsOf(curves[chosen]), hasParts = partsOf(chosen).length > 0;
    if (hasParts) drawParts(layerPen, chosen, steps, yOf);
    else drawOtherCurves(layerPen, chosen, yOf);
    layerPen.strokeStyle = hasParts ? theme.text : theme.value;
    layerPen.lineWidth = hasParts ? 1 : 2;
    layerPen.beginPath();
    tracePath(layerPen, steps, (i) => yOf(curves[chosen].held[i]));
    layerPen.stroke();
  });
  if (isNear) drawLimit(pen, data.capacities[chosen], yOf, [5, 4]);
  const reserved = reservedOf(chosen);
  if (reserved && reserved <= most) drawLimit(pen, reserved, yOf, [1, 3]);
  drawCursor(pen, heights.curves);
  const { held: heldOf } = curves[chosen], isPeakAlone = data.curvesAreBytes && heldOf.every((each) => each === heldOf[0]);
  const what = !data.curvesAreBytes ? "Stage activations over time" :
    isPeakAlone ? "Peak of allocated memory (no curve was recorded)" : "Allocated memory over time";
  const which = `rank ${chosen}${chosen === fullest && numRanks > 1 ? ", the fullest" : ""}`;
  element("caption").textContent = `${what} on ${which}: ${isPeakAlone ? "" : "peak "}${formatHeld(peaks[chosen])}` +
    (reserved ? `; reserved ${formatBytes(reserved)} (dotted)` : "") +
    (data.capacities.length ? `; limit ${formatHeld(data.capacities[chosen])}${isNear ? " (dashed)" : ""}` : "");
  element("choice").value = chosen;
}

// -- the page -----------------------------------------------------------------------------------------------

let isPlanned = false;
function redraw() {
  if (isPlanned) return;
  isPlanned = true;
  requestAnimationFrame(() => {
    isPlanned = false;
    drawRows();
    drawCurves();
  });
}

function setTheme(name) {
  theme = { name, ...data.themes[name] };
  for (const key of ["ground", "text", "faint", "grid"])
    document.documentElement.style.setProperty(`--${key}`, theme[key]);
  drawLegend();
  redraw();
}

function swatch(colour, name = "") {
  const node = document.createElement("i");
  node.style.background = colour;
  node.className = name;
  return node;
}

/** Names and colours of categories of memory. */
function fillKey(key, names) {
  for (const name of names) {
    const entry = document.createElement("span");
    entry.append(swatch(page.categoryFills[name]), name);
    key.append(entry);
  }
}

function drawLegend() {
  const legend = element("legend");
  legend.textContent = "";
  const entry = (text, ...marks) => {
    const span = document.createElement("span");
    span.append(...marks, text);
    legend.append(span);
    return span;
  };
  for (const index of data.shown) entry(data.kinds[index].name, swatch(data.kinds[index].fill));
  if (data.numChunks > 1) {
    const fills = data.kinds[data.shown[0]].fills, most = Math.min(fills.length, 8);
    const shown = Array.from({ length: most }, (_, n) => swatch(fills[Math.round((n * (fills.length - 1)) / (most - 1))]));
    entry(`first to last of ${fills.length} stages of a rank`, ...shown).className = "shades";
  }
  if (moves.start.length) {
    entry("value on its way", swatch(theme.value, "line"));
    entry("gradient on its way", swatch(theme.gradient, "line"));
  }
}

function isBeside(i, rank) {
  return i >= data.laneOffsets[2 * rank + 1];
}

function find(x, y) {
  const rank = Math.floor((y - head) / pitch), seconds = secondsAt(x);
  if (x < left || rank < 0 || rank >= numRanks) return [-1, -1];
  for (let i = data.laneOffsets[2 * rank]; i < data.laneOffsets[2 * rank + 2]; i++) {
    if (bars.start[i] > seconds || bars.start[i] + bars.seconds[i] < seconds) continue;
    const [, above, , height] = barBox(i, rank, isBeside(i, rank));
    if (y >= above && y <= above + height) return [i, rank];
  }
  return [-1, rank];
}

function describe(event) {
  if (hovered < 0) element("tip").hidden = true;
  else showTip(event, barText(hovered), describeBar());
}

function showTip(event, heading, lines) {
  const tip = element("tip"), name = document.createElement("b");
  tip.hidden = false;
  name.textContent = heading;
  tip.replaceChildren(name, ...lines.map((line) => ["\n", line]).flat(2));
  const { width, height } = tip.getBoundingClientRect(), { clientWidth, clientHeight } = document.documentElement;
  tip.style.left = `${Math.min(event.clientX + 14, clientWidth - width - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 16, clientHeight - height - 8)}px`;
}

function describeBar() {
  const kind = data.kinds[bars.kind[hovered]], start = bars.start[hovered], seconds = bars.seconds[hovered];
  const microbatch = bars.microbatch[hovered] < 0 ? "" : `, microbatch ${bars.microbatch[hovered]}`;
  const lines = [
    `${kind.name} of stage ${bars.stage[hovered]}${microbatch}`,
    `${formatSeconds(start, 6)} to ${formatSeconds(start + seconds, 6)}, takes ${formatSeconds(seconds)}`,
  ];
  const bytes = bars.bytes[hovered];
  if (bytes) lines.push(`${bytes > 0 ? "keeps" : "frees"} ${formatBytes(Math.abs(bytes))}`);
  lines.push(`rank ${hoveredRank} holds ${formatHeld(heldAt(hoveredRank, cursor))}` +
    (data.curvesAreBytes ? "" : " stage activations"));
  return lines;
}

/** What a rank holds at a moment, by category as in the picture. */
function describeHeld(rank, seconds) {
  const i = indexAt(curves[rank], seconds);
  const lines = partsOf(rank).map(([name, bytesAt]) => [
    swatch(page.categoryFills[name]), `${name}: ${formatBytes(bytesAt(i))}`,
  ]);
  return [`on rank ${rank} at ${formatSeconds(seconds, 6)}`, ...lines.reverse()];
}

function show(from, to) {
  const span = Math.min(Math.max(to - from, data.makespan * 1e-6), data.makespan);
  view.from = Math.min(Math.max(from, 0), data.makespan - span);
  view.to = view.from + span;
  redraw();
}

function zoom(factor, at = (view.from + view.to) / 2) {
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}

const move = (part) => show(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));

let drag = null;
const rows = element("rows");
rows.addEventListener("wheel", (event) => {
  event.preventDefault();
  const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (isSideways) move((event.deltaX || event.deltaY) / plotWidth());
  else zoom(Math.exp(event.deltaY * 0.0015), secondsAt(event.offsetX));
}, { passive: false });
rows.addEventListener("pointerdown", (event) => {
  drag = { x: event.clientX, from: view.from, to: view.to, moved: false };
  rows.setPointerCapture(event.pointerId);
});
rows.addEventListener("pointermove", (event) => {
  if (drag) {
    const by = ((drag.x - event.clientX) / plotWidth()) * (drag.to - drag.from);
    drag.moved = drag.moved || Math.abs(drag.x - event.clientX) > 3;
    if (drag.moved) return show(drag.from + by, drag.to + by);
  }
  cursor = secondsAt(event.offsetX);
  [hovered, hoveredRank] = find(event.offsetX, event.offsetY);
  describe(event);
  redraw();
});
rows.addEventListener("pointerup", () => {
  if (drag && !drag.moved) {
    followed = hovered < 0 || followed === bars.microbatch[hovered] ? -1 : bars.microbatch[hovered];
    if (hoveredRank >= 0) chosenRank = hoveredRank;
  }
  drag = null;
  redraw();
});
function leave() {
  hovered = hoveredRank = -1;
  cursor = null;
  element("tip").hidden = true;
  redraw();
}
rows.addEventListener("pointerleave", leave);
const picture = element("curves");
picture.addEventListener("pointermove", (event) => {
  cursor = Math.min(Math.max(secondsAt(event.offsetX), view.from), view.to);
  showTip(event, formatHeld(heldAt(shownRank(), cursor)), describeHeld(shownRank(), cursor));
  redraw();
});
picture.addEventListener("pointerleave", leave);
rows.addEventListener("dblclick", () => show(0, data.makespan));
element("in").onclick = () => zoom(0.6);
element("out").onclick = () => zoom(1 / 0.6);
element("all").onclick = () => show(0, data.makespan);
element("path").onclick = followPath;
element("theme").onclick = () => setTheme(theme.name === "dark" ? "light" : "dark");
document.addEventListener("keydown", (event) => {
  const does = {
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: () => show(0, data.makespan),
    ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), c: followPath, Escape: () => { followed = -1; redraw(); },
  }[event.key];
  if (does && !event.ctrlKey && !event.metaKey) does();
});
window.addEventListener("resize", redraw);

for (const name of [page.name, ...Object.keys(page.others)].filter((_, i, all) => all.length > 1)) {
  const chooses = element("buttons").insertBefore(document.createElement("button"), element("path"));
  chooses.textContent = name;
  chooses.title = `The timeline as ${name}`;
  chooses.className = name === (named || page.name) ? "chosen" : "";
  chooses.onclick = () => { location.hash = name; location.reload(); };
}
const choice = document.createElement("select");
choice.id = "choice";
choice.title = "The rank whose memory is shown";
choice.append(...curves.map((_, rank) => new Option(`rank ${rank}`, rank)));
choice.onchange = () => {
  chosenRank = +choice.value;
  redraw();
};
element("held").append(choice);
if (data.curvesAreBytes) element("held").append(button("CSV", "The memory of this rank over time as numbers", saveHeld));
fillKey(element("categories"), new Set(data.curves.flatMap((curve) => Object.keys(curve.parts))));
element("title").textContent = page.report?.title ?? data.title;
element("subtitle").textContent = data.subtitle;
setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
