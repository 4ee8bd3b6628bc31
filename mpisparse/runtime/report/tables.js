// What the page shows as tables: the bars of phases, and CSV to download.
"use strict";

function download(name, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// The rows that a chart shows now.
function shownRows(mark) {
  if (mark === "phases") return barRows();
  const chart = page.data.charts[mark];
  const range = page.view.zoom[chart.along];
  return chart.shape === "heat" ? heatRows(chart, range) : rowsOf(page.data, chart, page.view, range);
}

function heatRows(chart, range) {
  const { stretches } = chart.heat;
  const most = Math.max(...stretches.map(({ cells }) => cells[0].length));
  const head = ["steps", ...Array.from({ length: most }, (_, i) => `workload ${i + 1} of ${most}`)];
  const row = (step, cells) => [step, ...cells.map((v) => (v === null ? "" : 1 + v))];
  const rows = stretches.flatMap(({ steps, cells }) => steps.map((step, i) => row(step, cells[i])));
  return [head, ...rows.filter(([step]) => !range || (step >= range[0] && step <= range[1]))];
}

// The rows of all charts in one table, one value per row.
function allRows() {
  const rows = [["chart", "run", "axis", "place", "value"]];
  for (const figure of document.querySelectorAll("main figure")) {
    if (figure.offsetParent === null) continue; // of a hidden run
    const title = figure.querySelector("figcaption b").textContent;
    const owner = figure.closest(".run")?.querySelector("h3")?.textContent;
    const [head, ...body] = shownRows(figure.dataset.chart);
    head.slice(1).forEach((name, i) => {
      const found = body.filter((row) => (row[i + 1] ?? "") !== "");
      rows.push(...found.map((row) => [owner ? `${title}: ${owner}` : title, name, head[0], row[0], row[i + 1]]));
    });
  }
  return rows;
}

// Who has a bar: runs, or groups of those that differ only by their seed.
function barOwners() {
  const shown = page.data.runs.map((run, i) => i).filter((i) => !page.view.hidden.has(i));
  if (!page.view.grouped) return shown.map((i) => ({ name: page.data.runs[i].name, runs: [i] }));
  const groups = page.data.groups.map((name, g) => ({ name, runs: shown.filter((i) => page.data.runs[i].group === g) }));
  return groups.filter(({ runs }) => runs.length);
}

function meanPhase({ runs }, row) {
  const values = runs.map((i) => page.data.phases.values[i][row]);
  return values.some((v) => v !== null) ? values.reduce((sum, v) => sum + (v ?? 0), 0) / runs.length : null;
}

function barRows() {
  const owners = barOwners();
  const rows = page.data.phases.names.map((name, row) => [name, ...owners.map((owner) => meanPhase(owner, row) ?? "")]);
  return [["phase, seconds", ...owners.map((owner) => owner.name)], ...rows];
}

// The mean time of each phase, a bar for each run or group.
function drawBars() {
  const place = document.querySelector("figure[data-chart=phases] .plot");
  if (!place) return;
  const owners = barOwners();
  const rows = barRows().slice(1).filter((row) => row.slice(1).some((value) => value !== ""));
  const longest = Math.max(...rows.flatMap((row) => row.slice(1)).map(Number));
  const table = element("table", { className: owners.length > 4 ? "bars thin" : "bars" });
  for (const [name, ...values] of rows) {
    const cell = element("td");
    values.forEach((value, i) => {
      if (value === "") return;
      const bar = element("i", { title: `${owners[i].name}: ${say(value, "seconds")}` });
      bar.style.setProperty("--c", `var(--c${page.place({ run: owners[i].runs[0] }) % COLOURS})`);
      bar.style.width = `${(78 * value) / longest}%`;
      cell.append(element("div", {}, bar, ...(owners.length > 4 ? [] : [say(value, "seconds")])));
    });
    const meaning = page.data.phases.meanings[page.data.phases.names.indexOf(name)];
    table.append(element("tr", {}, element("th", { scope: "row", textContent: name, title: meaning }), cell));
  }
  place.replaceChildren(table);
}
