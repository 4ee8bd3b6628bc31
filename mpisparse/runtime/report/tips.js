// The values at a chart's cursor.
"use strict";

const TIP_ROWS = 12;
const BRIEF_ROWS = 4; // lines of a chart whose values are shown while the pointer is on another chart

// Show the values: with names where the pointer is, and briefly in the other charts.
function showTip(plot, here) {
  const { tip, u } = plot;
  const { left, top } = u.cursor;
  const rows = left >= 0 ? valuesAt(plot, left, top) : [];
  tip.hidden = !rows.length || (!here && rows.length > BRIEF_ROWS);
  if (tip.hidden) return;
  const more = rows.length > TIP_ROWS ? [`… ${rows.length - TIP_ROWS} more`] : [];
  tip.className = here ? "tip" : "tip brief";
  tip.replaceChildren(...(here ? [place(plot, left)] : []), ...rows.slice(0, TIP_ROWS).map(tipRow), ...more);
  const beyond = left + tip.offsetWidth + 16 > u.over.clientWidth && left > u.over.clientWidth / 2;
  const edge = 4 - u.over.getBoundingClientRect().left; // of the window
  tip.style.left = `${Math.max(edge, beyond ? left - tip.offsetWidth - 8 : left + 8)}px`;
  tip.style.top = here ? `${Math.max(0, Math.min(top + 10, u.over.clientHeight - tip.offsetHeight))}px` : "0px";
}

// Where the cursor is: "steps: 30".
function place(plot, left) {
  const { kind, label } = plot.page.data.axes[plot.chart.along];
  const x = plot.u.posToVal(left, "x");
  return `${label}: ${kind === "count" ? number(Math.round(x)) : say(x, kind)}`;
}

// Rows of the tip: [colour, name, value as text], greatest first, or as they lie on each other.
function valuesAt(plot, left, top) {
  const { u, chart, lines } = plot;
  if (chart.shape === "heat") return heatValue(u, chart, left, top);
  const x = u.posToVal(left, "x");
  const near = Math.abs(u.posToVal(left + 20, "x") - x);
  const rows = [];
  for (const line of chart.shape === "edges" ? lines.slice(1, -1) : lines) {
    const known = knownOf(line);
    const i = nearest(known.x, x);
    if (i < 0 || x < known.x[0] - near || x > known.x[known.x.length - 1] + near) continue;
    rows.push([plot.colour(line), line.name, known.y[i]]);
  }
  if (chart.shape === "lines") rows.sort((a, b) => b[2] - a[2]);
  else rows.reverse();
  return rows.map(([colour, name, value]) => [colour, name, say(value, chart.kind)]);
}

// The points of a line that have a value: steps between exchanges have none.
function knownOf(line) {
  const rows = line.known ? [] : line.y.flatMap((value, i) => (value === null ? [] : [i]));
  return (line.known ??= { x: rows.map((i) => line.x[i]), y: rows.map((i) => line.y[i]) });
}

function tipRow([colour, name, value]) {
  const [row, swatch, label, number] = ["div", "i", "span", "b"].map((tag) => document.createElement(tag));
  swatch.className = "swatch";
  swatch.style.background = colour;
  label.textContent = name;
  number.textContent = value;
  row.append(swatch, label, number);
  return row;
}

// The index of the value nearest to x in an ascending list; -1 if it is empty.
function nearest(list, x) {
  let [low, high] = [0, list.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] <= x) low = middle;
    else high = middle;
  }
  return high < 0 ? -1 : x - list[low] <= list[high] - x ? low : high;
}

function heatValue(u, chart, left, top) {
  const [step, row] = [u.posToVal(left, "x"), u.posToVal(top, "y")];
  const stretch = chart.heat.stretches.find(({ steps }) => step <= steps[steps.length - 1]);
  if (!stretch || row < 0 || row >= stretch.count) return [];
  const column = stretch.cells[stretch.steps.findIndex((each) => step <= each)];
  const value = column[Math.floor((row * column.length) / stretch.count)];
  if (value === null) return [];
  return [[value > 0 ? ABOVE : BELOW, `partition ${Math.floor(row) + 1}`, say(1 + value, "percent")]];
}
