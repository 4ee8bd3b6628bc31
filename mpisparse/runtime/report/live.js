// While `mpisparse report --serve` runs: ask for the page again, and take over what is new in it.
"use strict";

let tag = null; // of the page that is shown

async function refresh() {
  const answer = await fetch(location.href, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
  if (answer.status === 304) return "";
  if (!answer.ok) throw new Error(await answer.text());
  takeOver(new DOMParser().parseFromString(await answer.text(), "text/html"));
  tag = answer.headers.get("ETag");
  return "";
}

// Replace tables and figures, and give the figures their plots back; what the reader chose and opened stays.
function takeOver(newer) {
  const before = page.data;
  page.data = JSON.parse(newer.getElementById("data").textContent);
  const open = [...document.querySelectorAll("details")].map((details) => details.open);
  const large = [...document.querySelectorAll("figure.large")].map((figure) => figure.dataset.chart);
  const old = page.plots;
  for (const part of ["title", "header", "main", "footer"]) {
    document.querySelector(part).replaceWith(document.adoptNode(newer.querySelector(part)));
  }
  document.querySelectorAll("details").forEach((details, i) => { details.open = open[i] || false; });
  for (const figure of document.querySelectorAll("main figure")) {
    figure.classList.toggle("large", large.includes(figure.dataset.chart));
  }
  followRuns(before);
  showColours();
  fillFigures(old);
  drawBars();
}

// A run that has had its first step may come before others: keep the right ones hidden, and list it.
function followRuns(before) {
  const hidden = [...page.view.hidden].map((i) => before.runs[i].name);
  page.view.hidden = new Set(page.data.runs.flatMap((run, i) => (hidden.includes(run.name) ? [i] : [])));
  const listed = ({ runs }) => JSON.stringify(runs.map((run) => [run.name, run.group]));
  if (listed(before) !== listed(page.data)) fillBar();
}

async function watch() {
  const status = () => document.getElementById("live");
  for (;;) {
    if (!document.hidden) {
      try {
        await refresh();
        status().textContent = `live, ${new Date().toLocaleTimeString()}`;
        status().className = "";
      } catch (error) {
        status().textContent = error instanceof TypeError ? "the server has ended" : error.message;
        status().className = "old";
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * page.data.live));
  }
}

if (page.data.live) watch();
