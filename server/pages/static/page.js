// The theme and the charts of every page: of the console, and of reports in one file.
"use strict";
const embertide = (() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);

  // Drawn again in another theme or width.
  const drawings = [];
  const redraw = () => {
    for (const draw of drawings) draw();
  };
  addEventListener("resize", redraw);

  // --- theme ---
  const theme = document.getElementById("theme");
  const nameTheme = () => {
    if (theme) theme.textContent = isDark() ? "Light" : "Dark";
  };
  if (theme) {
    theme.hidden = false;
    theme.addEventListener("click", () => {
      root.dataset.theme = isDark() ? "light" : "dark";
      try {
        localStorage.setItem("embertide-theme", root.dataset.theme);
      } catch {
        // It holds for this page alone.
      }
      nameTheme();
      redraw();
    });
  }
  dark.addEventListener("change", () => {
    nameTheme();
    redraw();
  });
  nameTheme();

  // --- charts ---
  const DAY_PARTS = [1 / 1440, 1 / 288, 1 / 96, 1 / 24, 1 / 8, 1 / 4, 1 / 2, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
  const clock = (day) => {
    const minutes = Math.round((day - Math.floor(day)) * 1440);
    return `${String(Math.floor(minutes / 60)).padStart(2, "0")}:${String(minutes % 60).padStart(2, "0")}`;
  };
  const nearest = (day) => Math.round(day * 1440) / 1440;
  const dayTick = (day) => (Number.isInteger(nearest(day)) ? `day ${nearest(day)}` : clock(nearest(day)));
  const dayText = (day) => `day ${Math.floor(nearest(day))}, ${clock(nearest(day))}`;
  // 1, 2, 5, 10, 20, 50 ... from a bound to another.
  const decades = (low, high) => {
    const found = [];
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
      for (const step of [1, 2, 5]) if (step * power >= low * 0.999 && step * power <= high * 1.001) found.push(step * power);
    return found;
  };

  // A stretch of the x axis: moves are shaded, and where there was nothing the chart is hatched.
  const drawBand = (plot, { from, to, kind }) => {
    const { ctx: pen, bbox: box } = plot;
    const ratio = devicePixelRatio || 1;
    const left = Math.max(plot.valToPos(from, "x", true), box.left);
    const right = Math.min(plot.valToPos(to, "x", true), box.left + box.width);
    const width = Math.max(right - left, 2 * ratio);
    if (right < left) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, box.top, width, box.height);
    pen.clip();
    if (kind === "nothing") {
      pen.fillStyle = colour("--page");
      pen.fillRect(left, box.top, width, box.height);
      pen.strokeStyle = colour("--muted");
      pen.lineWidth = ratio;
      for (let x = left - box.height; x < right + box.height; x += 8 * ratio) {
        pen.beginPath();
        pen.moveTo(x, box.top + box.height);
        pen.lineTo(x + box.height, box.top);
        pen.stroke();
      }
    } else {
      pen.fillStyle = colour("--accent");
      pen.globalAlpha = 0.2;
      pen.fillRect(left, box.top, width, box.height);
      pen.globalAlpha = 1;
      for (const x of [left, left + width - 2 * ratio]) pen.fillRect(x, box.top, 2 * ratio, box.height);
    }
    pen.restore();
  };

  // Lines over time, of columns as uPlot takes them: x, then a list for each series, null where it has no value.
  //   x       "time" in seconds since 1970, or "day" of an event's time
  //   least   of x that is shown
  //   range   of y: [low, high]
  //   series  label, colour as a style's variable, dash
  //   unit, digits, times   how a value is said: times * value, with so many digits
  //   log     y by decades;   steps   a value holds since the one before;   stacked   values add up
  //   bands   from, to, kind: "moves" or "nothing"
  const lines = (element, chart, columns) => {
    const width = Math.max(element.clientWidth - 20, 280);
    const say = (value) =>
      value == null ? "-" : `${(value * (chart.times ?? 1)).toFixed(chart.digits ?? 1)}${chart.unit ? ` ${chart.unit}` : ""}`;
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    const [xs, ...values] = columns;
    // A stack is drawn from its top, each layer over those above it.
    const drawn = chart.stacked
      ? values.map((_, layer) => xs.map((_x, at) => (values[0][at] == null ? null : values.slice(0, layer + 1).reduce((sum, each) => sum + each[at], 0))))
      : values;
    const order = chart.series.map((_, at) => at);
    if (chart.stacked) order.reverse();
    element.replaceChildren();
    return new uPlot(
      {
        width,
        height: 220,
        series: [
          chart.x === "day" ? { label: "Event time", value: (_, day) => (day == null ? "-" : dayText(day)) } : {},
          ...order.map((at) => ({
            label: chart.series[at].label,
            stroke: colour(chart.stacked ? "--card" : chart.series[at].colour),
            fill: chart.stacked ? colour(chart.series[at].colour) : undefined,
            width: chart.stacked ? 1 : 2,
            dash: chart.series[at].dash ? [6, 4] : undefined,
            ...(chart.steps ? { paths: uPlot.paths.stepped({ align: -1, alignGaps: -1 }), points: { show: false } } : {}),
            value: (_, _value, _series, row) => say(row == null ? null : values[at][row]),
          })),
        ],
        axes: [
          chart.x === "day" ? { ...axis, incrs: DAY_PARTS, values: (_, days) => days.map(dayTick) } : axis,
          {
            ...axis,
            label: chart.label,
            size: 56,
            values: (_, ticks) => ticks.map((tick) => +(tick * (chart.times ?? 1)).toPrecision(6)),
            ...(chart.log ? { splits: () => decades(...chart.range), filter: (_, ticks) => ticks } : {}),
          },
        ],
        cursor: { drag: { x: true, y: false } },
        scales: {
          // A first value has a place, too.
          x: { time: chart.x !== "day", range: (_, first, last) => [Math.min(first, last - chart.least), last] },
          y: { distr: chart.log ? 3 : 1, range: () => chart.range },
        },
        hooks: { draw: [(plot) => (chart.bands ?? []).forEach((band) => drawBand(plot, band))] },
      },
      [xs, ...order.map((at) => drawn[at])],
      element,
    );
  };

  // Charts of a page that carries their figures itself.
  const carried = [...document.querySelectorAll("[data-chart]")].map((element) => ({ element, chart: JSON.parse(element.dataset.chart) }));
  const plots = new Map();
  drawings.push(() => {
    for (const { element, chart } of carried) {
      plots.get(element)?.destroy();
      plots.set(element, lines(element, chart, chart.columns));
    }
  });
  if (carried.length) redraw();

  return { colour, lines, onRedraw: (draw) => drawings.push(draw) };
})();
