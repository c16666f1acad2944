// The live parts of the console: refreshes, the chart of staleness and the heat map.
"use strict";
(() => {
  const EVERY_MS = 3000;
  const byId = (id) => document.getElementById(id);
  const { colour, lines, onRedraw } = embertide;

  // --- refreshes ---
  let paused = false;
  let answeredAt = new Date();
  const pause = byId("pause");
  const isLive = () => byId("live")?.hasAttribute("hx-get");
  if (pause && isLive()) {
    pause.hidden = false;
    pause.addEventListener("click", () => {
      paused = !paused;
      pause.setAttribute("aria-pressed", String(paused));
      pause.textContent = paused ? "Resume updates" : "Pause updates";
    });
  }
  const isTyping = () => {
    const at = document.activeElement;
    return at && at.closest("#live") && /^(INPUT|SELECT)$/.test(at.tagName);
  };
  const refresh = () => {
    if (paused || document.hidden || !isLive() || isTyping()) return;
    htmx.trigger(byId("live"), "refresh");
    load();
  };
  const away = (is) => {
    const banner = byId("away");
    if (!banner) return;
    if (!is) answeredAt = new Date();
    byId("since").textContent = `${answeredAt.toISOString().slice(0, 19).replace("T", " ")} UTC`;
    banner.hidden = !is;
  };
  document.addEventListener("htmx:error", () => away(true));
  document.addEventListener("htmx:after:request", () => away(false));
  setInterval(refresh, EVERY_MS);

  // --- figures over time ---
  let series = null;
  let heat = null;
  let plot = null;
  const fetched = async (element) => {
    const kind = byId("heat-kind");
    const query = element.id === "heat" && kind ? `&kind=${encodeURIComponent(kind.value)}` : "";
    const answer = await fetch(element.dataset.series + query, { headers: { "HX-Request": "true" } });
    if (answer.status === 401) location.assign("/login");
    return answer.ok ? answer.json() : null;
  };
  const load = async () => {
    const chart = byId("staleness");
    const map = byId("heat");
    try {
      if (chart) series = (await fetched(chart)) ?? series;
      if (map) heat = (await fetched(map)) ?? heat;
    } catch {
      return; // the refresh of the page says that the console is away
    }
    draw();
  };

  const STALENESS = {
    series: [
      { label: "worst node", colour: "--bad" },
      { label: "median node", colour: "--muted", dash: true },
    ],
    label: "s",
    unit: "s",
    least: 300, // five minutes
  };
  const drawChart = (element) => {
    const columns = series.slice(0, 3);
    plot?.destroy();
    plot = lines(element, { ...STALENESS, range: [0, Math.max(1, ...columns[1])] }, columns);
  };

  const drawHeat = (canvas) => {
    const { rows, epochs, values: columns } = heat;
    const cell = Math.max(3, Math.min(14, Math.floor(420 / Math.max(rows.length, 1))));
    const width = canvas.parentElement.clientWidth;
    const ratio = devicePixelRatio || 1;
    const height = Math.max(rows.length * cell, 40);
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = colour("--heat-0");
    pen.fillRect(0, 0, width, height);
    const wide = Math.max(width / 120, 2);
    const left = width - wide * columns.length;
    const most = Math.log1p(Math.max(1, ...columns.map((column) => Math.max(0, ...column))));
    const colours = [0, 1, 2, 3, 4, 5, 6].map((level) => colour(`--heat-${level}`));
    columns.forEach((column, x) => {
      column.forEach((value, y) => {
        if (!value) return;
        pen.fillStyle = colours[Math.max(1, Math.round((6 * Math.log1p(value)) / most))];
        pen.fillRect(left + x * wide, y * cell, Math.ceil(wide), cell > 4 ? cell - 1 : cell);
      });
      if (x && epochs[x] !== epochs[x - 1]) {
        pen.fillStyle = colour("--text");
        pen.fillRect(left + x * wide, 0, 1, height);
      }
    });
    canvas.onmousemove = (event) => {
      const y = Math.floor(event.offsetY / cell);
      const x = Math.floor((event.offsetX - left) / wide);
      if (!rows[y] || !columns[x]) return;
      const when = new Date(heat.times[x] * 1000).toISOString().slice(11, 19);
      byId("heat-at").textContent = `${rows[y]}: ${columns[x][y].toLocaleString("en")} at ${when} UTC, plan ${epochs[x]}`;
    };
  };

  const draw = () => {
    const chart = byId("staleness");
    const map = byId("heat");
    if (chart && series) drawChart(chart);
    if (map && heat) drawHeat(map);
  };
  byId("heat-kind")?.addEventListener("change", load);
  onRedraw(draw);
  if (byId("staleness") || byId("heat")) load();
})();
