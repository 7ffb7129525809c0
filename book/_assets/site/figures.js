/* Draws every figure of a page from the JSON beside it, in the colours and the font of the page's theme.
   A classic script without dependencies but plotly, so that it also works on file://. */
(function () {
  "use strict";

  var NARROW = 560; // CSS pixels of figure width; book.css reserves the height by the same number

  function set(target, path, value) {
    var keys = path.split(".");
    var last = keys.pop();
    keys.forEach(function (key) {
      target = target[key] = target[key] || {};
    });
    target[last] = value;
  }

  function setAll(target, values) {
    Object.keys(values || {}).forEach(function (path) {
      set(target, path, values[path]);
    });
  }

  /* Light text means a dark page: true for every theme, whatever its switch is called. */
  function isDark(color) {
    var rgb = (color.match(/[\d.]+/g) || [0, 0, 0]).map(Number);
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2] > 127;
  }

  function Figure(element) {
    this.element = element;
    this.plot = element.querySelector(".lipattn-plot");
    this.source = element.querySelector('script[type="application/json"]').textContent;
    this.drawn = false;
  }

  Figure.prototype.state = function () {
    var css = getComputedStyle(this.element);
    return {
      color: css.color,
      family: css.fontFamily,
      dark: isDark(css.color),
      narrow: this.element.clientWidth < NARROW,
    };
  };

  Figure.prototype.draw = function () {
    var now = this.state();
    if (this.drawn && JSON.stringify(now) === JSON.stringify(this.last)) return;
    var spec = JSON.parse(this.source);
    var layout = spec.layout;
    var touch = window.matchMedia("(pointer: coarse)").matches;
    var fixed = now.narrow || touch;
    if (now.dark) {
      spec.data.forEach(function (trace) {
        setAll(trace, trace.meta && trace.meta.dark);
      });
    }
    if (now.narrow) setAll(layout, layout.meta && layout.meta.narrow);
    delete layout.height; // the page reserves it (book.css)
    delete layout.width;
    layout.autosize = true;
    layout.uirevision = "reader"; // a redraw keeps the reader's zoom and hidden lines
    setAll(layout.template.layout, { "font.color": now.color, "font.family": now.family });
    if (fixed) {
      layout.dragmode = false; // a finger on the plot scrolls the page
      Object.keys(layout).forEach(function (key) {
        if (/^[xy]axis\d*$/.test(key)) layout[key].fixedrange = true;
      });
    }
    var config = {
      responsive: true,
      displaylogo: false,
      displayModeBar: fixed ? false : "hover",
      modeBarButtons: [["toImage", "resetScale2d"]],
      doubleClick: fixed ? false : "reset",
    };
    (this.drawn ? Plotly.react : Plotly.newPlot)(this.plot, spec.data, layout, config);
    this.drawn = true;
    this.last = now;
    this.element.setAttribute("data-drawn", now.dark ? "dark" : "light");
  };

  function start() {
    var figures = Array.prototype.map.call(document.querySelectorAll(".lipattn-figure"), function (element) {
      return new Figure(element);
    });
    if (!figures.length) return;
    if (!window.Plotly) {
      figures.forEach(function (figure) {
        figure.plot.hidden = true; // the caption remains
      });
      return;
    }

    function drawAll() {
      figures.forEach(function (figure) {
        figure.draw();
      });
    }

    function redraw() {
      requestAnimationFrame(function () {
        figures.forEach(function (figure) {
          if (figure.drawn) figure.draw();
        });
      });
    }

    var near = new IntersectionObserver(
      function (entries) {
        entries.forEach(function (entry) {
          if (!entry.isIntersecting) return;
          near.unobserve(entry.target);
          entry.target.lipattn.draw();
        });
      },
      { rootMargin: "600px 0px" }
    );
    var sizes = new ResizeObserver(function (entries) {
      entries.forEach(function (entry) {
        var figure = entry.target.lipattn;
        if (!figure.drawn) return;
        figure.draw(); // restacks if the page has become narrow or wide
        if (entry.contentRect.width > 0) Plotly.Plots.resize(figure.plot);
      });
    });
    figures.forEach(function (figure) {
      figure.element.lipattn = figure;
      near.observe(figure.element);
      sizes.observe(figure.element);
    });
    new MutationObserver(redraw).observe(document.documentElement, {
      attributes: true,
      attributeFilter: ["data-theme", "data-mode", "class"],
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
    window.addEventListener("beforeprint", drawAll);
    window.lipattnFigures = { drawAll: drawAll };
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
