// What is drawn where actions, or points of a curve, are narrower than a pixel: the mean of all that lies in a pixel.

const WIDE = 3; // pixels; wider actions are drawn one by one even between narrow ones

const channelsOf = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const fillChannels = data.kinds.map((kind) => kind.fills.map(channelsOf));

const PATH = -2; // followed in place of a microbatch: the critical path

/** How opaque an action is while others are followed. */
function strengthOf(i) {
  const isMeant = followed === PATH ? bars.critical[i] : followed < 0 || followed === bars.microbatch[i];
  return isMeant ? 1 : 0.22;
}

/** A picture drawn once and shown until `key` or its size changes. */
const layers = {};
function layer(name, key, { width, height }, draw) {
  const found = (layers[name] ??= { canvas: document.createElement("canvas"), key: null });
  const whole = [key, width, height].join();
  if (found.key !== whole) {
    Object.assign(found.canvas, { width, height });
    found.key = whole;
    draw(found.canvas.getContext("2d"));
  }
  return found.canvas;
}

/** How much of each pixel column of a lane the actions `begin` to `end` fill, and their mean colour; wide ones are left out. */
function columnsOf(begin, end, numColumns, wide) {
  const sums = new Float32Array(4 * numColumns), perSecond = numColumns / (view.to - view.from);
  for (let i = begin; i < end; i++) {
    const from = Math.max((bars.start[i] - view.from) * perSecond, 0);
    const to = Math.min((bars.start[i] + bars.seconds[i] - view.from) * perSecond, numColumns);
    if (to <= from) continue;
    if (to - from >= WIDE) {
      wide.push(i);
      continue;
    }
    const [red, green, blue] = fillChannels[bars.kind[i]][bars.chunk[i]];
    const strength = (bars.half[i] ? 0.5 : 1) * strengthOf(i);
    for (let column = Math.floor(from); column < to; column++) {
      const part = (Math.min(to, column + 1) - Math.max(from, column)) * strength, at = 4 * column;
      sums[at] += red * part;
      sums[at + 1] += green * part;
      sums[at + 2] += blue * part;
      sums[at + 3] += part;
    }
  }
  return sums;
}

/** Paint one row of pixels and stretch it over the box of a lane. */
function paintColumns(pen, sums, y, height) {
  const numColumns = sums.length / 4, image = new ImageData(numColumns, 1);
  for (let at = 0; at < sums.length; at += 4) {
    const share = sums[at + 3];
    if (share === 0) continue;
    for (let channel = 0; channel < 3; channel++) image.data[at + channel] = sums[at + channel] / share;
    image.data[at + 3] = 255 * Math.min(share, 1);
  }
  const strip = (layers.strip ??= { canvas: document.createElement("canvas") }).canvas;
  if (strip.width !== numColumns) Object.assign(strip, { width: numColumns, height: 1 });
  strip.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(strip, left, y, plotWidth(), height);
}

/** How many curves pass through each pixel, column by column. */
function countCurves(ranks, rowOf, numColumns, numRows) {
  const counts = new Uint16Array(numColumns * numRows), perSecond = numColumns / (view.to - view.from);
  for (const rank of ranks) {
    const { time, held } = curves[rank];
    let i = indexAt(curves[rank], view.from), last = rowOf(held[i]);
    i++;
    for (let column = 0; column < numColumns; column++) {
      const until = view.from + (column + 1) / perSecond;
      let highest = -Infinity, lowest = Infinity;
      for (; i < time.length && time[i] < until; i++) {
        if (held[i] > highest) highest = held[i];
        if (held[i] < lowest) lowest = held[i];
      }
      let top = last, bottom = last;
      if (highest >= lowest) {
        top = Math.min(top, rowOf(highest));
        bottom = Math.max(bottom, rowOf(lowest));
        last = rowOf(held[i - 1]);
      }
      for (let row = top; row <= bottom; row++) counts[column * numRows + row]++;
    }
  }
  return counts;
}

/** All curves of `ranks` in one colour, each of them so opaque; many curves cost no more than their pixels. */
function paintCurves(pen, ranks, yOf, height, colour, opacity) {
  const ratio = window.devicePixelRatio || 1, numColumns = Math.round(plotWidth() * ratio);
  const numRows = Math.round(height * ratio);
  const rowOf = (held) => Math.min(Math.max(Math.round(yOf(held) * ratio), 0), numRows - 1);
  const counts = countCurves(ranks, rowOf, numColumns, numRows);
  const image = new ImageData(numColumns, numRows), [red, green, blue] = channelsOf(colour);
  for (let row = 0, at = 0; row < numRows; row++)
    for (let column = 0; column < numColumns; column++, at += 4) {
      const count = counts[column * numRows + row];
      if (count) image.data.set([red, green, blue, 255 * (1 - (1 - opacity) ** count)], at);
    }
  const sheet = (layers.sheet ??= { canvas: document.createElement("canvas") }).canvas;
  Object.assign(sheet, { width: numColumns, height: numRows });
  sheet.getContext("2d").putImageData(image, 0, 0);
  pen.drawImage(sheet, left, 0, plotWidth(), height);
}
