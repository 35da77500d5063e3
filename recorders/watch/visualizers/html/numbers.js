// Numbers: what the page holds, decoded, and figures computed from it.
"use strict";

const report = JSON.parse(document.getElementById("report").textContent);
const charts = report.charts, runs = report.runs, layers = report.layers;
/** What the ticks of all runs are: epochs, steps, or just ticks. */
const axisName = runs.every((run) => run.axis === runs[0].axis) ? runs[0].axis : "tick";
const kindOf = (layer) => report.kinds[layer] ?? "";
const MISSING = -(2 ** 127);
const EMPTY = new Float32Array(0);

/** Float32 numbers from base64 of zlib of all their lowest bytes, if these are kept, then the next ones, up to the highest. */
async function decoded(text) {
  const packed = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const first = report.exact ? 0 : 1, n = bytes.length / (4 - first), words = new Uint32Array(n);
  for (let plane = first; plane < 4; plane++) {
    const start = (plane - first) * n;
    for (let i = 0; i < n; i++) words[i] |= bytes[start + i] << 8 * plane;
  }
  return new Float32Array(words.buffer);
}

/** Decodes everything. A chart gets `place`, from layer to row, and each run's part of it `values`: statistic, layer, tick. */
async function unpack() {
  const waiting = [];
  charts.forEach((chart, c) => {
    chart.place = new Map(chart.layers.map((layer, row) => [layer, row]));
    for (const run of runs) {
      const part = run.charts[c], text = part.values;
      part.values = EMPTY;
      waiting.push(decoded(text).then((values) => { part.values = values; }));
    }
  });
  await Promise.all(waiting);
  charts.forEach((chart, c) => { if (chart.across.length && !chart.overall) runs.forEach((run) => share(chart, c, run)); });
}

/** One statistic of one layer in one run, by tick; empty if there is none. */
function series(chart, run, layer, statistic) {
  const part = run.charts[charts.indexOf(chart)], at = part.statistics.indexOf(statistic), row = chart.place.get(layer);
  if (at < 0 || row === undefined) return EMPTY;
  const n = run.ticks.length, start = (at * chart.layers.length + row) * n;
  return part.values.subarray(start, start + n);
}

const isNumber = (value) => Number.isFinite(value) && value !== MISSING;  // not of undefined either
const isBad = (value) => value !== undefined && !Number.isFinite(value);
/** Whether values are drawn on a logarithmic axis: as the chart says, until somebody chooses. */
const isLog = (chart) => chart.chosen ?? chart.log;

/** The first and the last tick that charts show; null for all. */
let zoom = null;

/** Which of some ascending ticks are shown: the first, and the one behind the last. */
function within(ticks) {
  if (!zoom) return [0, ticks.length];
  const first = ticks.findIndex((tick) => tick >= zoom[0]), end = ticks.findIndex((tick) => tick > zoom[1]);
  return first < 0 ? [ticks.length, ticks.length] : [first, end < 0 ? ticks.length : end];
}

const statisticsOf = (chart) => [...new Set([...chart.lines, ...chart.ranges.flatMap(endsOf)])].filter((name) =>
  runs.some((run) => run.charts[charts.indexOf(chart)].statistics.includes(name)));
const hasNumbers = (chart) => chart.overall && chart.across.length ? sources(chart).some((of) => of.chart && hasNumbers(of.chart))
  : runs.some((run) => run.charts[charts.indexOf(chart)].values.length);
const lineOf = (chart) => chart.lines.find((name) => statisticsOf(chart).includes(name)) ?? statisticsOf(chart)[0];
const sources = (chart) => chart.across.map((across) => ({ ...across, chart: charts.find((one) => one.title === across.title) }));

/** The statistics of both ends of a range. */
function endsOf(range) { return range === "std" ? ["mean", "std"] : range.split("-"); }

/** Both ends of a range over time. */
function band(chart, run, layer, range) {
  const [first, second] = endsOf(range).map((name) => series(chart, run, layer, name));
  if (!first.length || !second.length) return null;
  if (range !== "std") return { low: first, high: second };
  const [floor, ceiling] = chart.limits.map((limit, i) => limit ?? [-Infinity, Infinity][i]);
  const within = (value) => Math.max(floor, Math.min(ceiling, value));
  const ends = (sign) => first.map((mean, i) => isNumber(mean) && isNumber(second[i]) ? within(mean + sign * second[i]) : MISSING);
  return { low: ends(-1), high: ends(1) };
}

const bad = new Map();  // by chart, run and layer, because every search asks for all of them
/** Where values were not finite, as indices: counted by the monitor, or in the line itself. */
function badAt(chart, run, layer) {
  const key = `${charts.indexOf(chart)} ${runs.indexOf(run)} ${layer}`;
  if (!bad.has(key)) {
    const counts = series(chart, run, layer, "nonfinite"), line = series(chart, run, layer, lineOf(chart)), found = [];
    for (let i = 0; i < run.ticks.length; i++) if (isBad(line[i]) || isBad(counts[i]) || counts[i] > 0) found.push(i);
    bad.set(key, chart.across.length ? [] : found);
  }
  return bad.get(key);
}

/** The part that each layer has in the sum over layers: the values of a chart that compares by "share". */
function share(chart, c, run) {
  const [{ chart: of, statistic }] = sources(chart), n = run.ticks.length;
  const values = new Float32Array(chart.layers.length * n).fill(MISSING), sums = new Float64Array(n);
  const rows = of ? chart.layers.map((layer) => series(of, run, layer, statistic)) : [];
  for (const row of rows) row.forEach((value, i) => { if (isNumber(value)) sums[i] += value; });
  rows.forEach((row, r) => row.forEach((value, i) => { if (isNumber(value) && sums[i]) values[r * n + i] = value / sums[i]; }));
  chart.lines = ["share"];
  chart.ranges = [];
  run.charts[c] = { statistics: ["share"], values: rows.some((row) => row.length) ? values : EMPTY };
}

/** The lines of a chart that compares by "min" or "max": the lowest or highest value at each tick, and the layer that has it. */
function extremes(chart, run) {
  return sources(chart).filter((of) => of.chart && of.show !== "share").map((of) => {
    const values = new Float32Array(run.ticks.length).fill(MISSING), from = new Array(run.ticks.length).fill(MISSING);
    for (const layer of chart.layers) {
      series(of.chart, run, layer, of.statistic).forEach((value, i) => {
        if (!isNumber(value) || (values[i] !== MISSING && (of.show === "min" ? value >= values[i] : value <= values[i]))) return;
        values[i] = value;
        from[i] = layer;
      });
    }
    return { name: `${of.show === "min" ? "lowest" : "highest"} ${of.title}`, values, from };
  });
}

/** The last recorded value, NaN included; undefined if there is none. */
function last(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== MISSING) return values[i];
  return undefined;
}

/** How much two numbers differ: the ratio, as a logarithm, if both are positive, else the difference. */
function change(a, b) {
  if (a === undefined || b === undefined) return undefined;
  return isBad(a) !== isBad(b) ? Infinity : isBad(a) ? 0 : a > 0 && b > 0 ? Math.abs(Math.log(b / a)) : Math.abs(b - a);
}

/** The smallest, the largest and the smallest positive number of several arrays. */
function extent(arrays) {
  let low = Infinity, high = -Infinity, least = Infinity;
  for (const values of arrays) {
    for (const value of values) {
      if (!isNumber(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
      if (value > 0 && value < least) least = value;
    }
  }
  return { low, high, least };
}

/** A number in at most four digits. */
function shown(value) {
  if (value === undefined || value === MISSING) return "\u2013";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  const size = Math.abs(value);
  const text = size && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace("e+", "e").replaceAll("-", "\u2212");
}
