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
function cleared(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = FONT;
  pen.textBaseline = "middle";
  return { pen, width, height, scale };
}

/** Round numbers within a range, about `count` of them; powers of ten for logarithmic axes. */
function marks(low, high, count, log, whole) {
  if (log) {
    const first = Math.ceil(Math.log10(low) - 1e-9), end = Math.floor(Math.log10(high) + 1e-9);
    const step = Math.ceil((end - first + 1) / count) || 1;
    if (end > first) return Array.from({ length: Math.floor((end - first) / step) + 1 }, (_, i) => 10 ** (first + i * step));
  }
  const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
  const fine = [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999) * power, step = whole ? Math.max(1, Math.ceil(fine)) : fine;
  const first = Math.ceil(low / step - 1e-9), length = Math.max(0, Math.min(50, Math.floor(high / step + 1e-9) - first + 1));
  return Array.from({ length }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** A name cut at its front, because the ends of module names tell more. */
function fitted(pen, text, width) {
  let low = 0, high = text.length;
  if (pen.measureText(text).width <= width) return text;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pen.measureText(`\u2026${text.slice(middle)}`).width <= width) high = middle; else low = middle + 1;
  }
  return `\u2026${text.slice(low)}`;
}

/** The value axis for the lines and bands of some figures, as far as they are in view: its ends, padded. */
function axis(chart, figures) {
  const values = figures.flatMap(({ ticks, lines, bands }) => [
    ...lines.filter(({ hidden }) => !hidden).map((line) => line.values), ...bands.flatMap(({ low, high }) => [low, high]),
  ].map((all) => all.slice(...within(ticks))));
  let { low, high, least } = extent(values);
  const [floor, ceiling] = chart.limits;
  if (isLog(chart) && least < Infinity) return { low: least / 1.15, high: high * 1.15, log: true };
  if (low > high) return { low: 0, high: 1, log: false };
  const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.5;
  low -= pad;
  high += pad;
  if (floor !== null) low = Math.max(low, floor - (high - floor) * 0.03);
  if (ceiling !== null) high = Math.min(high, ceiling + (ceiling - low) * 0.03);
  return { low, high, log: false };
}

/**
 * Lines and bands over ticks. `figure`: {ticks, span: [first, last tick], axis(), lines: [{values, colour, dash, hidden}],
 * bands: [{low, high, colour, alpha}], bad: indices of ticks, marks: [{tick, style}]}; `cursor`: the index of a tick to point at; `from`: that of the tick
 * at which a range begins that is being chosen. Returns its geometry.
 */
function drawLines(canvas, figure, cursor, from) {
  const { pen, width, height } = cleared(canvas), { low, high, log } = figure.axis(), [start, end] = zoom ?? figure.span;
  const box = { left: 58, right: width - 10, top: 8, bottom: height - 40 }, ink = colour("--soft"), scale = log ? Math.log : Number;
  const across = (tick) => box.left + (end > start ? (tick - start) / (end - start) : 0.5) * (box.right - box.left);
  const x = (i) => across(figure.ticks[i]);
  const y = (value) => {
    const share = (scale(log ? Math.max(value, low) : value) - scale(low)) / (scale(high) - scale(low));
    return box.bottom - Math.max(-0.02, Math.min(1.02, share)) * (box.bottom - box.top);
  };
  const path = (points) => {
    pen.beginPath();
    for (const [px, py] of points) pen.lineTo(px, py);
  };
  const pieces = (values, use) => {  // values that are not finite leave gaps; ticks without a value do not
    let piece = [];
    for (let i = 0; i <= values.length; i++) {
      if (isNumber(values[i]) && (!log || values[i] > 0)) piece.push(i);
      else if (values[i] !== MISSING && piece.length) {
        use(piece);
        piece = [];
      }
    }
  };
  pen.strokeStyle = colour("--grid");
  pen.fillStyle = ink;
  pen.textAlign = "right";
  for (const value of marks(low, high, Math.max(2, height / 45), log)) {
    const at = Math.round(y(value)) + 0.5;
    path([[box.left, at], [box.right, at]]);
    pen.stroke();
    pen.fillText(shown(value), box.left - 6, at);
  }
  pen.textAlign = "center";
  pen.fillText(axisName, (box.left + box.right) / 2, height - 9);
  for (const tick of end > start ? marks(start, end, width / 90, false, true) : [start]) pen.fillText(String(tick), across(tick), height - 26);
  pen.save();
  pen.beginPath();
  pen.rect(box.left - 4, 0, box.right - box.left + 8, height);
  pen.clip();
  for (const { low: below, high: above, colour: name, alpha } of figure.bands) {
    const bottom = (i) => y(isNumber(below[i]) ? below[i] : low);
    pen.fillStyle = colour(name);
    pen.globalAlpha = alpha;
    pieces(above, (piece) => {
      const edge = piece.length > 1 ? [0] : [-3, 3];  // one tick has no area to fill
      const upper = edge.flatMap((dx) => piece.map((i) => [x(i) + dx, y(above[i])]));
      const lower = edge.flatMap((dx) => piece.map((i) => [x(i) + dx, bottom(i)]));
      path([...upper, ...lower.reverse()]);
      pen.fill();
    });
    pen.globalAlpha = 1;
  }
  const dot = (i, values) => {
    pen.beginPath();
    pen.arc(x(i), y(values[i]), 2.5, 0, 7);
    pen.fill();
  };
  for (const { values, colour: name, dash } of figure.lines.filter(({ hidden }) => !hidden)) {
    pen.strokeStyle = pen.fillStyle = colour(name);
    Object.assign(pen, { lineWidth: 1.8, lineJoin: "round" });
    pen.setLineDash(dash ?? []);
    pieces(values, (piece) => {
      path(piece.map((i) => [x(i), y(values[i])]));
      pen.stroke();
      if (piece.length === 1 || figure.ticks.length <= 12) for (const i of piece) dot(i, values);
    });
  }
  pen.setLineDash([]);
  pen.fillStyle = colour("--bad");
  for (const i of figure.bad) {
    path([[x(i) - 4, box.bottom], [x(i) + 4, box.bottom], [x(i), box.bottom - 8]]);
    pen.fill();
  }
  for (const { tick, style } of figure.marks) {  // since then something was found
    const at = Math.round(across(tick)) + 0.5;
    Object.assign(pen, { strokeStyle: colour(`--${style}`), fillStyle: colour(`--${style}`), lineWidth: 1.5 });
    pen.setLineDash([5, 3]);
    path([[at, box.top], [at, box.bottom]]);
    pen.stroke();
    pen.setLineDash([]);
    path([[at, box.top - 6], [at + 9, box.top - 1.5], [at, box.top + 3]]);
    pen.fill();
  }
  if (cursor !== undefined) {
    const at = Math.round(x(cursor)) + 0.5;
    Object.assign(pen, { strokeStyle: ink, lineWidth: 1 });
    path([[at, box.top], [at, box.bottom]]);
    pen.stroke();
    if (from !== undefined) {
      Object.assign(pen, { fillStyle: colour("--focus"), globalAlpha: 0.25 });
      pen.fillRect(x(from), box.top, x(cursor) - x(from), box.bottom - box.top);
    }
  }
  pen.restore();
  const [first, behind] = within(figure.ticks);
  const nearest = (px) => {
    let best = first;
    for (let i = first; i < behind; i++) if (Math.abs(x(i) - px) < Math.abs(x(best) - px)) best = i;
    return best;
  };
  return { at: (px) => first < behind ? [0, nearest(px)] : null };
}

/** The colours of a heat map: a map, its ends, which are those of the data, and whether it is logarithmic. */
function shades(chart, arrays) {
  const [floor, ceiling] = chart.limits, { low, high, least } = extent(arrays), bounded = floor !== null && ceiling !== null;
  if (low > high) return { map: CIVIDIS, low: 0, high: 1, log: false };
  if (bounded && floor < 0 && ceiling > 0 && !chart.across.length) {  // both signs: as far from zero on either side
    const far = Math.max(-low, high);
    return { map: DIVERGING, low: -far, high: far, log: false };
  }
  const log = least < Infinity && (chart.chosen ?? (chart.log || (low >= 0 && high / least > 1e3)));
  return { map: CIVIDIS, low: log ? least : low, high, log };
}

function shadeOf({ low, high, log }, value) {
  const share = log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
  return Math.max(0, Math.min(255, Math.round(255 * (high > low ? share : value === 0 ? 0 : 0.5))));
}

/** The pixels of a heat map, one row for a layer; a pixel may stand for several ticks. */
function heatImage(heat, width) {
  const n = heat.ticks.length, image = new ImageData(width, heat.rows.length), paint = new Uint32Array(image.data.buffer);
  const word = ([r, g, b]) => 255 << 24 | b << 16 | g << 8 | r, words = table(heat.shades.map).map(word);
  const mark = word(colour("--bad").match(/\d+/g).map(Number));
  heat.rows.forEach(({ values, bad }, r) => {
    const hit = new Set(bad);
    for (let at = 0; at < width; at++) {
      const start = Math.floor(at * n / width), end = Math.max(start + 1, Math.floor((at + 1) * n / width));
      let sum = 0, count = 0, marked = false;
      for (let i = start; i < end; i++) {
        if (hit.has(i) || isBad(values[i])) marked = true;
        else if (isNumber(values[i])) { sum += values[i]; count += 1; }
      }
      if (marked) paint[r * width + at] = mark; else if (count) paint[r * width + at] = words[shadeOf(heat.shades, sum / count)];
    }
  });
  return image;
}

/** The height of a row of a heat map, and of the whole, so that the page has its length before the map is drawn. */
function heatSize(count) {
  const row = Math.max(1, Math.min(18, Math.floor(480 / Math.max(count, 1))));
  return { row, height: count * row + 40 };
}

/** Layers by ticks. `heat`: {rows: [{name, values, bad: indices of ticks, marks}], ticks, shades}; `place`: [row, index of a tick]. */
function drawHeat(canvas, heat, place) {
  const count = heat.rows.length, n = heat.ticks.length, { row } = heatSize(count), bottom = count * row;
  const { pen, width, height, scale } = cleared(canvas), left = width > 420 ? 150 : 96;
  const wide = Math.max(1, Math.min(width - left - 8, n * 40)), x = (i) => left + i / n * wide;
  pen.fillStyle = colour("--hatch");
  pen.fillRect(left, 0, wide, bottom);
  if (!count || !n) return { at: () => null };
  const image = heatImage(heat, Math.round(wide * scale)), sheet = document.createElement("canvas");
  Object.assign(sheet, { width: image.width, height: image.height });
  sheet.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(sheet, left, 0, wide, bottom);
  heat.rows.forEach(({ marks }, r) => marks.forEach(({ at, style }) => {  // on a ground that stands out from all colours of the map
    pen.fillStyle = colour("--card");
    pen.fillRect(x(at) - 2, r * row, 4, row);
    pen.fillStyle = colour(`--${style}`);
    pen.fillRect(x(at) - 1, r * row, 2, row);
  }));
  pen.fillStyle = colour("--soft");
  pen.textAlign = "right";
  const first = row < 14 ? Math.round(7 / row) : 0;  // the first row with room for its name
  for (let r = first; r < count; r += Math.ceil(15 / row)) pen.fillText(fitted(pen, heat.rows[r].name, left - 8), left - 6, (r + 0.5) * row);
  pen.textAlign = "center";
  pen.fillText(axisName, left + wide / 2, height - 9);
  for (let i = 0; i < n; i += Math.ceil(n / Math.max(1, wide / 70))) pen.fillText(String(heat.ticks[i]), x(i + 0.5), height - 26);
  if (place) {
    Object.assign(pen, { strokeStyle: colour("--focus"), lineWidth: 2 });
    pen.strokeRect(x(place[1]) - 1, place[0] * row - 1, Math.max(3, wide / n) + 2, row + 2);
  }
  const inside = (px, py) => px >= left && px < left + wide && py >= 0 && py < bottom;
  return { at: (px, py) => inside(px, py) ? [Math.floor(py / row), Math.min(n - 1, Math.floor((px - left) / wide * n))] : null };
}

/** Small lines without axes, of one or two runs. */
function drawSpark(canvas, lines) {
  const { pen, width, height } = cleared(canvas), { low, high } = extent(lines.map((line) => line.values));
  for (const { values, colour: name } of lines) {
    const step = Math.max(1, Math.floor(values.length / (2 * width)));
    const x = (i) => values.length > 1 ? 2 + i / (values.length - 1) * (width - 4) : width / 2;
    const y = (value) => height - 3 - (high > low ? (value - low) / (high - low) : 0.5) * (height - 6);
    pen.strokeStyle = colour(name);
    Object.assign(pen, { lineWidth: 1.4, lineCap: "round" });
    pen.beginPath();
    let open = false;
    for (let i = 0; i < values.length; i += step) {
      if (isNumber(values[i])) {
        if (open) pen.lineTo(x(i), y(values[i])); else pen.moveTo(x(i) - (values.length === 1), y(values[i]));
        if (values.length === 1) pen.lineTo(x(i) + 1, y(values[i]));
      }
      open = isNumber(values[i]) || (open && values[i] === MISSING);
    }
    pen.stroke();
    pen.fillStyle = colour("--bad");
    for (let i = 0; i < values.length; i++) if (isBad(values[i])) pen.fillRect(x(i) - 1, 0, 2, height);
  }
}

/** A sample for a legend: a line, a band if it has an `alpha`, or all colours of a map. */
function drawKey(canvas, { colour: name, alpha, dash, map }) {
  const { pen, width, height } = cleared(canvas);
  if (map) {
    table(map).forEach((rgb, i) => {
      pen.fillStyle = `rgb(${rgb.join(" ")})`;
      pen.fillRect(i / 256 * width, 0, width / 256 + 1, height);
    });
    return;
  }
  pen.strokeStyle = pen.fillStyle = colour(name);
  Object.assign(pen, { globalAlpha: alpha ?? 1, lineWidth: 2.2 });
  pen.setLineDash(dash ?? []);
  pen.beginPath();
  pen.moveTo(0, height / 2);
  pen.lineTo(width, height / 2);
  if (alpha) pen.fillRect(0, 1, width, height - 2); else pen.stroke();
}
