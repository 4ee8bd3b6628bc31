// From the page's JSON block to the lines of a chart, and from these to CSV. Plain functions; nothing here touches the page.
"use strict";

// The lines that a chart shows: {name, style, colour, run, x, y, low, high, bad, raw}. `view` has what the reader chose:
// hidden (a set of runs), grouped, smoothing.
function linesOf(data, chart, view) {
  const chosen = chart.lines.filter((line) => !view.hidden.has(line.run)).map((line) => readLine(data, chart, line));
  const own = chosen.filter((line) => line.x.length); // on a log axis all places may be zero
  if (chart.shape !== "lines" || own.some((line) => line.fixed)) return own;
  const lines = view.grouped ? overSeeds(data, own) : own;
  return lines.map((line) => (line.style === "run" && line.everyStep ? smoothed(line, view.smoothing) : line));
}

function readLine(data, chart, line) {
  const table = data.runs[line.run].tables[line.table];
  const pick = (name) => table[`${line.y}.${name}`];
  const place = table[`x.${chart.along}`];
  const log = data.axes[chart.along].log;
  const rows = place.flatMap((x, i) => (x === null || (log && x <= 0) ? [] : [i]));
  const column = (values) => values && rows.map((i) => values[i]);
  const banded = line.style === "run";
  return {
    name: line.style === "run" ? line.name : `${line.name}, ${line.style}`,
    style: line.style, run: line.run, group: data.runs[line.run].group, key: `${line.table}\n${line.y}`,
    everyStep: line.table === "steps",
    fixed: line.colour, x: column(place), steps: column(table["x.steps"]), y: column(table[line.y]),
    low: banded ? column(pick("low")) : undefined, high: banded ? column(pick("high")) : undefined,
    bad: (pick("bad") || []).map((i) => place[i]).filter((x) => x !== null),
  };
}

// Replace runs that differ only by their seed by one line: their mean, and a band from the least to the greatest.
function overSeeds(data, lines) {
  const groups = new Map();
  for (const line of lines) {
    const key = `${line.group}\n${line.key}\n${line.style}`;
    groups.set(key, [...(groups.get(key) || []), line]);
  }
  return [...groups.values()].map((members) => (members.length > 1 ? meanOf(data, members) : members[0]));
}

// The mean of lines, step by step, as far as all of them reach: of their values, and of their places on the axis.
function meanOf(data, members) {
  const from = Math.max(...members.map((line) => line.steps[0]));
  const to = Math.min(...members.map((line) => line.steps[line.steps.length - 1]));
  const steps = members[0].steps.filter((step) => step >= from && step <= to);
  const over = (name, combine) => {
    const values = members.map((line) => at({ x: line.steps, y: line[name] }, steps));
    return steps.map((_, i) => (values.some((v) => v[i] === null) ? null : combine(values.map((v) => v[i]))));
  };
  const mean = (v) => v.reduce((a, b) => a + b) / v.length;
  const name = data.groups[members[0].group] + (members[0].style === "run" ? "" : `, ${members[0].style}`);
  return {
    ...members[0], name, members: members.map((line) => line.run), bad: members.flatMap((line) => line.bad),
    steps, x: over("x", mean), y: over("y", mean),
    low: over("y", (v) => Math.min(...v)), high: over("y", (v) => Math.max(...v)),
  };
}

// A line's values at ascending places, interpolated; null next to a gap and outside. The line has a point.
function at(line, places) {
  let i = 0;
  return places.map((place) => {
    while (i < line.x.length - 1 && line.x[i + 1] <= place) i++;
    if (line.x[i] === place || i === line.x.length - 1) return line.x[i] <= place ? line.y[i] : null;
    const [a, b] = [line.y[i], line.y[i + 1]];
    if (a === null || b === null || place < line.x[i]) return null;
    return a + ((b - a) * (place - line.x[i])) / (line.x[i + 1] - line.x[i]);
  });
}

// A moving average with this weight of the past, free of the bias of its start; the values themselves stay as `raw`.
function smoothed(line, weight) {
  if (!weight) return line;
  let [sum, total] = [0, 0];
  const y = line.y.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
  return { ...line, y, raw: line.y, low: line.members ? line.low : undefined, high: line.members ? line.high : undefined };
}

// What a chart shows, as rows of a table: a column for the axis, then for each line its values and their range.
function rowsOf(data, chart, view, range) {
  const lines = linesOf(data, chart, view);
  const columns = lines.flatMap((line) => [
    [line.name, line.x, line.y],
    ...(line.raw ? [[`${line.name}, not smoothed`, line.x, line.raw]] : []),
    ...(line.low ? [[`${line.name}, least`, line.x, line.low], [`${line.name}, greatest`, line.x, line.high]] : []),
  ]);
  if (!columns.length) return [[data.axes[chart.along].label]];
  const joined = uPlot.join(columns.map(([, x, y]) => [x, y]));
  const inside = joined[0].flatMap((x, i) => (range && (x < range[0] || x > range[1]) ? [] : [i]));
  const body = inside.map((i) => joined.map((column) => column[i] ?? ""));
  return [[data.axes[chart.along].label, ...columns.map(([name]) => name)], ...body];
}

// CSV text. A text that a spreadsheet would take for a formula gets an apostrophe in front.
function csv(rows) {
  const cell = (value) => {
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
    return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
}
