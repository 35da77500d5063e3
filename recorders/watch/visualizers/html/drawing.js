// Drawing: line charts, heat maps and sparklines on canvases.

const CIVIDIS = ["00224e", "083370", "35456c", "4f576c", "666970", "7d7c78", "948e77", "aea371", "c8b866", "e5cf52", "fee838"];
const DIVERGING = ["7f3b08", "b25706", "e08214", "fcb761", "fee0b6", "f6f6f7", "d8daeb", "b1aad1", "8073ac", "532687", "2d004b"];
const BANDS = { "min-max": ["--wide", 0.24], std: ["--mean", 0.24], "Q1-Q3": ["--median", 0.26] };
const PALETTE = ["--mean", "--median", "--max", "--std", "--Q1", "--other"];
const FONT = "11.5px system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";

const tables = new Map(), colours = new Map(), probe = document.createElement("i");

/** A colour of the theme, as the browser computes it. */
function colour(name) {
  if (!colours.has(name)) {
    document.body.append(probe);
    probe.style.color = `var(${name}, var(--other))`;
    colours.set(name, getComputedStyle(probe).color);
    probe.remove();
  }
  return colours.get(name);
}

/** 256 colours between those of a map, as red, green, blue. */
function table(map) {
  if (!tables.has(map)) {
    const part = (text, k) => parseInt(text.slice(2 * k, 2 * k + 2), 16);
    tables.set(map, Array.from({ length: 256 }, (_, i) => {
      const at = i / 255 * (map.length - 1), low = Math.min(Math.floor(at), map.length - 2), rest = at - low;
      return [0, 1, 2].map((k) => Math.round(part(map[low], k) * (1 - rest) + part(map[low + 1], k) * rest));
    }));
  }
  return tables.get(map);
}

/** A cleared canvas of its own size on the screen, in CSS pixels. */
function cleared(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (height) canvas.style.height = `${height}px`;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round((height || canvas.clientHeight) * scale));
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = FONT;
  pen.textBaseline = "middle";
  return { pen, width, height: height || canvas.clientHeight, scale };
}

/** Round numbers within a range, about `count` of them; powers of ten for logarithmic axes. */
function marks(low, high, count, log, whole) {
  if (log) {
    const first = Math.ceil(Math.log10(low) - 1e-9), end = Math.floor(Math.log10(high) + 1e-9), step = Math.ceil((end - first + 1) / count) || 1;
    if (end > first) return Array.from({ length: Math.floor((end - first) / step) + 1 }, (_, i) => 10 ** (first + i * step));
  }
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999) * power;
  if (whole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && found.length < 50; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

/** A name cut at its front, because the ends of module names tell more. */
function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pen.measureText("\u2026" + text.slice(middle)).width <= width) high = middle; else low = middle + 1;
  }
  return "\u2026" + text.slice(low);
}

/** The value axis for some lines and bands: its ends, padded. */
function axis(chart, arrays) {
  let { low, high, least } = extent(arrays);
  const [floor, ceiling] = chart.limits, log = chart.log && least < Infinity;
  if (log) return { low: least / 1.15, high: Math.max(high, least) * 1.15, log };
  if (low > high) return { low: 0, high: 1, log: false };
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  low -= pad; high += pad;
  if (floor !== null) low = Math.max(low, floor - (high - floor) * 0.03);
  if (ceiling !== null) high = Math.min(high, ceiling + (ceiling - low) * 0.03);
  return { low, high, log: false };
}

/**
 * Lines and bands over ticks. `figure`: {ticks, span: [first, last tick], axis, lines: [{name, values, colour, dash, thin}],
 * bands: [{low, high, colour, alpha}], bad: indices of ticks}; `cursor`: the index of a tick to point at. Returns its geometry.
 */
function drawLines(canvas, figure, cursor) {
  const { pen, width, height } = cleared(canvas), { low, high, log } = figure.axis, [start, end] = figure.span;
  const box = { left: 58, right: width - 10, top: 8, bottom: height - 24 }, ink = colour("--soft");
  const scale = log ? Math.log : Number, x = (tick) => box.left + (end > start ? (tick - start) / (end - start) : 0.5) * (box.right - box.left);
  const y = (value) => {
    const share = (scale(Math.max(value, log ? low : -Infinity)) - scale(low)) / (scale(high) - scale(low));
    return box.bottom - Math.max(-0.02, Math.min(1.02, share)) * (box.bottom - box.top);
  };
  pen.strokeStyle = colour("--grid"); pen.fillStyle = ink; pen.lineWidth = 1;
  pen.textAlign = "right";
  for (const value of marks(low, high, Math.max(2, height / 45), log)) {
    const at = Math.round(y(value)) + 0.5;
    pen.beginPath(); pen.moveTo(box.left, at); pen.lineTo(box.right, at); pen.stroke();
    pen.fillText(shown(value), box.left - 6, at);
  }
  pen.fillText("tick", box.left - 14, height - 9);
  pen.textAlign = "center";
  for (const tick of end > start ? marks(start, end, width / 90, false, true) : [start]) pen.fillText(String(tick), x(tick), height - 9);
  const pieces = (values, use) => {  // values that are not finite leave gaps; ticks without a value do not
    let piece = [];
    for (let i = 0; i <= values.length; i++) {
      if (isNumber(values[i]) && (!log || values[i] > 0)) piece.push(i);
      else if (values[i] !== MISSING && piece.length) { use(piece); piece = []; }
    }
  };
  for (const { low: below, high: above, colour: name, alpha } of figure.bands) {
    pen.fillStyle = colour(name); pen.globalAlpha = alpha;
    pieces(above, (piece) => {
      if (piece.length === 1) { const i = piece[0], top = y(above[i]); return pen.fillRect(x(figure.ticks[i]) - 3, top, 6, Math.max(1, y(isNumber(below[i]) ? below[i] : low) - top)); }
      pen.beginPath();
      for (const i of piece) pen.lineTo(x(figure.ticks[i]), y(above[i]));
      for (const i of piece.toReversed()) pen.lineTo(x(figure.ticks[i]), y(isNumber(below[i]) ? below[i] : low));
      pen.fill();
    });
    pen.globalAlpha = 1;
  }
  for (const line of figure.lines.filter(({ hidden }) => !hidden)) {
    pen.strokeStyle = pen.fillStyle = colour(line.colour); pen.lineWidth = line.thin ? 1 : 1.8; pen.setLineDash(line.dash ?? []); pen.lineJoin = "round";
    pieces(line.values, (piece) => {
      pen.beginPath();
      for (const i of piece) pen.lineTo(x(figure.ticks[i]), y(line.values[i]));
      pen.stroke();
      if (piece.length === 1 || figure.ticks.length <= 12) for (const i of piece) { pen.beginPath(); pen.arc(x(figure.ticks[i]), y(line.values[i]), 2.5, 0, 7); pen.fill(); }
    });
  }
  pen.setLineDash([]); pen.fillStyle = colour("--bad");
  for (const i of figure.bad) { const at = x(figure.ticks[i]); pen.beginPath(); pen.moveTo(at - 4, box.bottom); pen.lineTo(at + 4, box.bottom); pen.lineTo(at, box.bottom - 8); pen.fill(); }
  if (cursor !== undefined) {
    const at = Math.round(x(figure.ticks[cursor])) + 0.5;
    pen.strokeStyle = ink; pen.lineWidth = 1; pen.beginPath(); pen.moveTo(at, box.top); pen.lineTo(at, box.bottom); pen.stroke();
  }
  return { nearest: (px) => figure.ticks.reduce((best, tick, i) => Math.abs(x(tick) - px) < Math.abs(x(figure.ticks[best]) - px) ? i : best, 0) };
}

/** The colours of a heat map: a map, its ends, and whether it is logarithmic. */
function shades(chart, arrays) {
  const [floor, ceiling] = chart.limits, { low, high, least } = extent(arrays);
  if (floor !== null && ceiling !== null && !chart.across.length) return { map: floor < 0 && ceiling > 0 ? DIVERGING : CIVIDIS, low: floor, high: ceiling, log: false };
  if (low > high) return { map: CIVIDIS, low: 0, high: 1, log: false };
  const log = least < Infinity && (chart.log || (low >= 0 && high / least > 1e3));
  return { map: CIVIDIS, low: log ? least : low, high: log || high > low ? high : low + 1, log };
}

function shadeOf({ low, high, log }, value) {
  const share = log ? Math.log(Math.max(value, low) / low) / (Math.log(high / low) || 1) : (value - low) / (high - low);
  return Math.max(0, Math.min(255, Math.round(255 * share)));
}

/** Layers by ticks. `heat`: {rows: [{name, values, bad: indices}], ticks, shades}; `cursor`: [row, index of a tick]. Returns its geometry. */
function drawHeat(canvas, heat, cursor) {
  const count = heat.rows.length, row = Math.max(1, Math.min(18, Math.floor(480 / Math.max(count, 1)))), labels = canvas.clientWidth > 420 ? 150 : 96;
  const { pen, width, height, scale } = cleared(canvas, count * row + 24), n = heat.ticks.length;
  const box = { left: labels, right: labels + Math.min(width - labels - 8, n * 40), bottom: count * row }, ink = colour("--soft");
  const pixels = Math.max(1, Math.min(Math.round((box.right - box.left) * scale), Math.max(n, 1) * 40)), image = new ImageData(pixels, Math.max(count, 1));
  const rgb = table(heat.shades.map), bad = colour("--bad").match(/[\d.]+/g).map(Number), paint = new Uint32Array(image.data.buffer);
  const word = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0, words = rgb.map(word), mark = word(bad);
  const starts = Array.from({ length: pixels + 1 }, (_, at) => Math.floor(at * n / pixels));
  heat.rows.forEach(({ values, bad: wrong }, r) => {
    const hit = new Set(wrong);
    for (let at = 0; at < pixels; at++) {  // a pixel may stand for several ticks: their mean, or the mark if one was not finite
      let sum = 0, seen = 0, flagged = false;
      for (let i = starts[at]; i < Math.max(starts[at + 1], starts[at] + 1) && i < values.length; i++) {
        if (hit.has(i) || isBad(values[i])) flagged = true;
        else if (isNumber(values[i])) { sum += values[i]; seen += 1; }
      }
      if (flagged) paint[r * pixels + at] = mark; else if (seen) paint[r * pixels + at] = words[shadeOf(heat.shades, sum / seen)];
    }
  });
  pen.fillStyle = colour("--hatch"); pen.fillRect(box.left, 0, box.right - box.left, box.bottom);
  const sheet = document.createElement("canvas");
  sheet.width = pixels; sheet.height = image.height;
  sheet.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  if (count) pen.drawImage(sheet, 0, 0, pixels, count, box.left, 0, box.right - box.left, box.bottom);
  pen.fillStyle = ink; pen.textAlign = "right";
  const every = Math.ceil(15 / row);
  for (let r = 0; r < count; r += every) pen.fillText(fitted(pen, heat.rows[r].name, labels - 8), labels - 6, Math.max(7, (r + 0.5) * row));
  pen.textAlign = "center";
  const room = Math.ceil(n / Math.max(1, (box.right - box.left) / 70));
  for (let i = 0; i < n; i += room) pen.fillText(String(heat.ticks[i]), box.left + (i + 0.5) / n * (box.right - box.left), height - 11);
  if (cursor && count && n) {
    pen.strokeStyle = colour("--focus"); pen.lineWidth = 2;
    pen.strokeRect(box.left + cursor[1] / n * (box.right - box.left) - 1, cursor[0] * row - 1, Math.max(3, (box.right - box.left) / n) + 2, row + 2);
  }
  return { at: (px, py) => px < box.left || px > box.right || py < 0 || py >= box.bottom || !n ? null : [Math.floor(py / row), Math.min(n - 1, Math.floor((px - box.left) / (box.right - box.left) * n))] };
}

/** Small lines without axes, of one or two runs. */
function drawSpark(canvas, lines) {
  const { pen, width, height } = cleared(canvas), { low, high } = extent(lines.map((line) => line.values));
  for (const { values, colour: name } of lines) {
    const step = Math.max(1, Math.floor(values.length / (2 * width))), x = (i) => 2 + i / Math.max(values.length - 1, 1) * (width - 4);
    const y = (value) => height - 3 - (high > low ? (value - low) / (high - low) : 0.5) * (height - 6);
    let open = false;
    pen.strokeStyle = pen.fillStyle = colour(name); pen.lineWidth = 1.4; pen.beginPath();
    for (let i = 0; i < values.length; i += step) {
      if (!isNumber(values[i])) { open = false; continue; }
      if (open) pen.lineTo(x(i), y(values[i])); else pen.moveTo(x(i), y(values[i]));
      open = true;
    }
    pen.stroke();
    if (values.length === 1 && isNumber(values[0])) { pen.beginPath(); pen.arc(width / 2, height / 2, 2.5, 0, 7); pen.fill(); }
    pen.fillStyle = colour("--bad");
    for (let i = 0; i < values.length; i++) if (isBad(values[i])) pen.fillRect(x(i) - 1, 0, 2, height);
  }
}

/** A sample of a line or a band for a legend, or the colours of a heat map. */
function drawKey(canvas, { colour: name, alpha, dash, map }) {
  const { pen, width, height } = cleared(canvas);
  if (map) { table(map).forEach(([r, g, b], i) => { pen.fillStyle = `rgb(${r} ${g} ${b})`; pen.fillRect(i / 256 * width, 0, width / 256 + 1, height); }); return; }
  pen.strokeStyle = pen.fillStyle = colour(name); pen.globalAlpha = alpha ?? 1;
  if (alpha) return void pen.fillRect(0, 1, width, height - 2);
  pen.setLineDash(dash ?? []); pen.lineWidth = 2.2; pen.beginPath(); pen.moveTo(0, height / 2); pen.lineTo(width, height / 2); pen.stroke();
}
