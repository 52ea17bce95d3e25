"use strict";
/* Draw the figures of an inspection. Names are only ever set as text. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const percent = (value, digits = 0) => `${(100 * value).toFixed(digits)}%`;
  const INFERNO = [[4, 3, 18], [38, 12, 81], [89, 16, 110], [140, 41, 99], [188, 55, 84], [227, 89, 51], [249, 140, 10], [249, 201, 50], [252, 255, 200]];
  const VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137], [53, 183, 121], [109, 205, 89], [253, 231, 37]];
  const state = { image: 0, layer: 0, head: -1, query: 0, mode: "heat", pinned: false, classes: data.images.map(() => 0) };
  const photos = data.images.map((image) => Object.assign(new Image(), { src: image.src }));
  let tables = [];

  // ---- numbers ----

  const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  async function inflate(text) {
    const stream = new Blob([decode(text)]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
  async function readTable(source) {
    const [values, maxima, sums] = await Promise.all([source.values, source.maxima, source.on_patches].map(inflate));
    const keys = source.grid[0] * source.grid[1];
    return { ...source, values, maxima: new Float32Array(maxima.buffer), sums: new Float32Array(sums.buffer), keys, queries: keys + source.extras.length };
  }
  /* Return the attention of a query to every patch; head -1 is the mean of all heads. */
  function attentionRow(table, layer, head, query) {
    const row = new Float32Array(table.keys), heads = head < 0 ? [...Array(data.model.heads).keys()] : [head];
    let sum = 0;
    for (const one of heads) {
      const index = (layer * data.model.heads + one) * table.queries + query, start = index * table.keys;
      for (let key = 0; key < table.keys; key++) {
        const share = table.values[start + key] / 255;
        row[key] += (share * share * table.maxima[index]) / heads.length;
      }
      sum += table.sums[index] / heads.length;
    }
    return { row, sum };
  }
  const scaled = (values) => { const largest = Math.max(...values) || 1; return Float32Array.from(values, (value) => value / largest); };
  const bytesToMap = (text) => Float32Array.from(decode(text), (value) => value / 255);

  // ---- canvases ----

  function colorAt(palette, value) {
    const place = Math.min(0.9999, Math.max(0, value)) * (palette.length - 1), low = Math.floor(place), part = place - low;
    return palette[low].map((from, channel) => from + part * (palette[low + 1][channel] - from));
  }
  /* Return a canvas with one pixel per cell; `paint` returns its [red, green, blue, alpha]. */
  function cells(map, [rows, columns], paint) {
    const canvas = Object.assign(document.createElement("canvas"), { width: columns, height: rows });
    const context = canvas.getContext("2d"), pixels = context.createImageData(columns, rows);
    map.forEach((value, index) => pixels.data.set(paint(value), 4 * index));
    context.putImageData(pixels, 0, 0);
    return canvas;
  }
  const overlays = {
    heat: (value) => [...colorAt(INFERNO, 0.12 + 0.88 * value), 255 * (0.28 + 0.6 * Math.min(1, 1.3 * value))],
    spotlight: (value) => [8, 9, 14, 255 * 0.92 * (1 - Math.min(1, 1.15 * value))],
    patches: (value) => [...colorAt(INFERNO, value), 255],
  };
  function size(canvas, image, longest) {
    const scale = longest / Math.max(image.width, image.height);
    canvas.width = Math.max(1, Math.round(image.width * scale));
    canvas.height = Math.max(1, Math.round(image.height * scale));
  }
  /* Return the width and height of the grid: larger than the canvas if a stem has rounded up its last cells. */
  const extent = (canvas, { covered: [down, across] }) => [canvas.width / across, canvas.height / down];
  /* Draw an image with a map above it, and a frame around the cell `mark`. */
  function draw(canvas, number, map, grid, longest, mark = null) {
    const image = data.images[number], context = canvas.getContext("2d");
    size(canvas, image, longest);
    context.imageSmoothingEnabled = !image.pixelated;
    context.imageSmoothingQuality = "high";
    context.drawImage(photos[number], 0, 0, canvas.width, canvas.height);
    if (map && state.mode === "heat") { // colors of the photo would mix with those of the map
      context.globalCompositeOperation = "saturation";
      context.fillStyle = "hsl(0 0% 50% / 85%)";
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.globalCompositeOperation = "source-over";
    }
    if (map) {
      context.imageSmoothingEnabled = state.mode !== "patches";
      context.drawImage(cells(map, grid, overlays[state.mode]), 0, 0, ...extent(canvas, image));
    }
    if (mark !== null && mark >= 0) {
      const [width, height] = extent(canvas, image).map((side, axis) => side / grid[1 - axis]);
      const x = (mark % grid[1]) * width, y = Math.floor(mark / grid[1]) * height, line = Math.max(2, canvas.width / 220);
      context.lineWidth = 2 * line; context.strokeStyle = "rgb(0 0 0 / 55%)"; context.strokeRect(x, y, width, height);
      context.lineWidth = line; context.strokeStyle = "#fff"; context.strokeRect(x, y, width, height);
    }
  }
  function cellAt(canvas, grid, event, [down, across] = [1, 1]) {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * grid[1] * across);
    const row = Math.floor(((event.clientY - box.top) / box.height) * grid[0] * down);
    return row < 0 || column < 0 || row >= grid[0] || column >= grid[1] ? null : row * grid[1] + column;
  }

  // ---- elements ----

  function element(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }
  function button(text, isPressed, onClick, className = "") {
    const node = element("button", { type: "button", className, textContent: text, onclick: onClick });
    node.setAttribute("aria-pressed", isPressed);
    return node;
  }
  function tile(text, isPressed, onClick) {
    const node = onClick ? button("", isPressed, onClick, "tile") : element("div", { className: "tile" });
    const canvas = document.createElement("canvas");
    node.append(canvas, text);
    return { node, canvas };
  }

  // ---- attention ----

  const table = () => tables[state.image];
  const layerName = (index) => `${table().layers[index] + 1} of ${data.model.layers}`;
  function select(changes) {
    Object.assign(state, changes);
    const limit = table().queries - 1;
    state.query = Math.min(Math.max(0, state.query), limit);
    drawAttention();
  }
  function selectImage(image) {
    const before = table(), grid = tables[image].grid, isPatch = state.query >= before.extras.length;
    const middle = before.extras.length + Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2);
    const query = isPatch && String(before.grid) !== String(grid) ? middle : state.query;
    select({ image, query, pinned: false });
    drawThumbnails();
    drawTokens();
  }
  function describe(row, sum) {
    const { grid, extras } = table(), [height, width] = data.model.patch, image = data.images[state.image];
    const rowScale = (image.grid[0] / grid[0]) * height, columnScale = (image.grid[1] / grid[1]) * width;
    const strongest = row.indexOf(Math.max(...row)), cell = state.query - extras.length, total = row.reduce((a, b) => a + b, 0) || 1;
    const name = cell < 0 ? `The ${extras[state.query]}` : `The patch in row ${Math.floor(cell / grid[1]) + 1}, column ${(cell % grid[1]) + 1}`;
    const where = `row ${Math.floor(strongest / grid[1]) + 1}, column ${(strongest % grid[1]) + 1}`;
    let text = ` looks most at ${where} (${percent(row[strongest], 1)} of its attention)`;
    if (cell >= 0) {
      let distance = 0;
      row.forEach((value, key) => {
        const down = (Math.floor(key / grid[1]) - Math.floor(cell / grid[1])) * rowScale, across = ((key % grid[1]) - (cell % grid[1])) * columnScale;
        distance += (value / total) * Math.hypot(down, across);
      });
      text += `, ${distance.toFixed(0)} pixels far on average`;
    }
    text += ".";
    if (extras.length) text += ` ${percent(Math.max(0, 1 - sum))} goes to ${extras.length > 1 ? "class token and registers" : `the ${extras[0]}`}.`;
    byId("readout").replaceChildren(element("b", { textContent: name }), text, state.pinned ? " Click again to let it go." : "");
  }
  function drawAttention() {
    const { grid, extras, layers } = table(), mark = state.query - extras.length;
    const { row, sum } = attentionRow(table(), state.layer, state.head, state.query);
    draw(byId("stage"), state.image, scaled(row), grid, 720, mark);
    describe(row, sum);
    byId("layer").value = state.layer;
    byId("head").value = state.head;
    byId("layer-value").textContent = layerName(state.layer);
    byId("head-value").textContent = state.head < 0 ? "mean of all" : `${state.head + 1} of ${data.model.heads}`;
    drawTiles(byId("heads"), data.model.heads, (head) => [`${head + 1}`, head === state.head, state.layer, head, { head: head === state.head ? -1 : head }]);
    drawTiles(byId("layers"), layers.length, (layer) => [`${layers[layer] + 1}`, layer === state.layer, layer, state.head, { layer }]);
    drawQueries();
    document.querySelectorAll("#distance .dot").forEach((dot) => {
      const isChosen = Number(dot.dataset.layer) === layers[state.layer] && (state.head < 0 || Number(dot.dataset.head) === state.head);
      dot.classList.toggle("chosen", isChosen);
    });
  }
  function drawTiles(parent, count, describeTile) {
    while (parent.children.length > count) parent.lastChild.remove();
    for (let index = 0; index < count; index++) {
      const [text, isPressed, layer, head, changes] = describeTile(index);
      if (!parent.children[index]) parent.append(tile(text, isPressed, () => {}).node);
      const node = parent.children[index];
      node.lastChild.textContent = text;
      node.setAttribute("aria-pressed", isPressed);
      node.onclick = () => select(changes);
      const { row } = attentionRow(table(), layer, head, state.query);
      draw(node.firstChild, state.image, scaled(row), table().grid, 120, state.query - table().extras.length);
    }
  }
  function drawQueries() {
    const { extras, grid } = table(), middle = extras.length + Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2);
    const isPatch = state.query >= extras.length;
    const chips = extras.map((name, query) => button(name, state.query === query, () => select({ query, pinned: true })));
    byId("queries").replaceChildren(...chips, button("a patch", isPatch, () => isPatch || select({ query: middle, pinned: false })));
  }
  function drawThumbnails() {
    byId("thumbnails").replaceChildren(...data.images.map((image, number) => {
      const node = button("", number === state.image, () => selectImage(number));
      node.title = image.name;
      node.append(element("img", { src: image.src, alt: image.name, className: image.pixelated ? "pixelated" : "" }));
      return node;
    }));
    byId("thumbnails").hidden = data.images.length < 2;
  }
  function drawModes() {
    const names = { heat: "heat", spotlight: "spotlight", patches: "values" };
    byId("modes").replaceChildren(...Object.entries(names).map(([mode, name]) => button(name, state.mode === mode, () => {
      select({ mode });
      drawModes();
      drawGallery();
    })));
  }
  function listen() {
    const stage = byId("stage");
    const query = (event) => { const cell = cellAt(stage, table().grid, event, data.images[state.image].covered); return cell === null ? null : cell + table().extras.length; };
    stage.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch" || state.pinned) return;
      const hovered = query(event);
      if (hovered !== null && hovered !== state.query) select({ query: hovered });
    });
    stage.addEventListener("click", (event) => {
      const clicked = query(event);
      if (clicked !== null) select({ query: clicked, pinned: event.pointerType !== "touch" && !(state.pinned && clicked === state.query) });
    });
    stage.addEventListener("keydown", (event) => {
      const { grid, extras } = table(), step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -grid[1], ArrowDown: grid[1] }[event.key];
      if (!step) return;
      event.preventDefault();
      const cell = Math.max(0, state.query - extras.length) + step;
      if (cell >= 0 && cell < grid[0] * grid[1]) select({ query: cell + extras.length, pinned: true });
    });
    byId("layer").addEventListener("input", (event) => select({ layer: Number(event.target.value) }));
    byId("head").addEventListener("input", (event) => select({ head: Number(event.target.value) }));
  }

  // ---- images side by side ----

  function figure(caption) {
    const canvas = document.createElement("canvas");
    return { canvas, node: element("figure", {}, canvas, element("figcaption", {}, ...caption)) };
  }
  function bars(predictions) {
    return predictions.map(({ label, probability }) => {
      const fill = element("i");
      fill.style.width = percent(probability, 1);
      return element("div", { className: "bar", title: label }, fill, element("span", { textContent: label }), element("span", { textContent: percent(probability) }));
    });
  }
  function drawGallery() {
    byId("gallery").replaceChildren(...data.images.map((image, number) => {
      const photo = figure([element("b", { textContent: image.name }), ...bars(image.predictions)]);
      draw(photo.canvas, number, null, image.grid, 420);
      const rolled = figure([element("b", { textContent: "Rollout" }), " of attention through all layers"]);
      draw(rolled.canvas, number, bytesToMap(image.rollout), image.grid, 420);
      const panels = [photo, rolled], chosen = image.relevance[state.classes[number]];
      if (chosen) {
        const chips = element("div", { className: "chips" }, ...image.relevance.map((one, index) => button(one.label, one === chosen, () => {
          state.classes[number] = index;
          drawGallery();
        })));
        const relevant = figure([element("b", { textContent: "Relevance" }), " for", chips]);
        draw(relevant.canvas, number, bytesToMap(chosen.map), image.grid, 420);
        panels.push(relevant);
      }
      const colors = figure([element("b", { textContent: "Features" }), " as colors"]);
      size(colors.canvas, image, 420);
      const context = colors.canvas.getContext("2d"), source = decode(image.features);
      const pixels = cells(new Float32Array(source.length / 3).map((_, index) => index), image.grid, (index) => [source[3 * index], source[3 * index + 1], source[3 * index + 2], 255]);
      context.imageSmoothingEnabled = false;
      context.drawImage(pixels, 0, 0, ...extent(colors.canvas, image));
      panels.push(colors);
      return element("div", { className: "row" }, ...panels.map((panel) => panel.node));
    }));
  }

  // ---- charts ----

  function svg(tag, attributes = {}, text = "") {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
    node.textContent = text;
    return node;
  }
  function ticks(low, high, count = 4) {
    const rough = (high - low) / count, unit = 10 ** Math.floor(Math.log10(rough || 1));
    const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((value) => value >= rough) || 1, result = [];
    for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) result.push(Number(value.toPrecision(6)));
    return result;
  }
  /* Return an empty chart, and functions from values to places. */
  function chart(parent, { label, role = "img", xRange, yRange, xTitle, yTitle, xTicks, format = String, width = 620, height = 300, top = 26 }) {
    const left = 46, right = 14, bottom = 40, node = svg("svg", { viewBox: `0 0 ${width} ${height}`, role, "aria-label": label });
    const x = (value) => left + ((value - xRange[0]) / (xRange[1] - xRange[0] || 1)) * (width - left - right);
    const y = (value) => height - bottom - ((value - yRange[0]) / (yRange[1] - yRange[0] || 1)) * (height - top - bottom);
    for (const value of ticks(...yRange)) {
      node.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: y(value), y2: y(value) }));
      node.append(svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    for (const value of xTicks) node.append(svg("text", { x: x(value), y: height - bottom + 18, "text-anchor": "middle" }, xTicks.format ? xTicks.format(value) : String(value)));
    node.append(svg("text", { x: left - 8, y: 11, "text-anchor": "start" }, yTitle));
    node.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, xTitle));
    parent.replaceChildren(node);
    return { node, x, y };
  }
  const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const layerTicks = (count) => [...Array(count).keys()].map((layer) => layer + 1).filter((layer) => count <= 16 || layer === 1 || layer % 4 === 0);

  function drawDistance() {
    const all = data.distance.flat(), uniform = data.uniform_distance || 0, wide = byId("distance").clientWidth > 640;
    const { node, x, y } = chart(byId("distance"), {
      label: "Mean attention distance of each head", role: "group", xRange: [0.6, data.model.layers + 0.4], yRange: [0, 1.08 * Math.max(...all, uniform, 1e-6)], xTitle: "layer", yTitle: "pixels",
      xTicks: layerTicks(data.model.layers), width: wide ? 1040 : 460, height: wide ? 340 : 300,
    });
    if (uniform) {
      node.append(svg("path", { class: "dashed", d: path([[x(0.6), y(uniform)], [x(data.model.layers + 0.4), y(uniform)]]) }));
      node.append(svg("text", { x: (wide ? 1040 : 460) - 14, y: 11, "text-anchor": "end" }, "- -  all patches alike"));
    }
    node.append(svg("path", { class: "mean", d: path(data.distance.map((heads, layer) => [x(layer + 1), y(heads.reduce((a, b) => a + b, 0) / heads.length)])) }));
    data.distance.forEach((heads, layer) => heads.forEach((value, head) => {
      const dot = svg("circle", { class: "dot", cx: x(layer + 1 + 0.3 * ((head + 0.5) / heads.length - 0.5)), cy: y(value), r: wide ? 6.5 : 4.5, tabindex: 0, role: "button", "data-layer": layer, "data-head": head });
      const text = `Layer ${layer + 1}, head ${head + 1}: ${value.toFixed(1)} pixels`;
      dot.append(svg("title", {}, text));
      dot.setAttribute("aria-label", text);
      const choose = () => {
        const place = table().layers.indexOf(layer);
        byId("distance-note").textContent = place < 0 ? `${text}. This page has no maps of layer ${layer + 1}.` : `${text}. Shown above.`;
        if (place >= 0) select({ layer: place, head });
      };
      dot.addEventListener("click", choose);
      dot.addEventListener("keydown", (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } });
      node.append(dot);
    }));
    const images = data.distance_images === 1 ? "one image" : `${data.distance_images} images`;
    byId("distance-note").textContent = `Averaged over ${images}.${data.distance_images < 32 ? " Pass more images for steadier numbers: the paper averages 128." : ""}`;
  }

  function drawLines(parent, label, series, format) {
    const values = series.flatMap((one) => one.values), layers = data.model.layers;
    const { node, x, y } = chart(parent, { label, xRange: [1, Math.max(2, layers)], yRange: [Math.min(0, ...values), 1.05 * Math.max(...values, 1e-6)], xTitle: "layer", yTitle: "", xTicks: layerTicks(layers), format, width: 460, height: 240 });
    series.forEach(({ values: line, color, name }, index) => {
      node.append(svg("path", { class: "line", style: `stroke: var(${color})`, d: path(line.map((value, layer) => [x(layer + 1), y(value)])) }));
      if (name) node.append(svg("text", { class: "label", style: `fill: var(${color})`, x: 46 + 90 * index, y: 14 }, name));
    });
  }
  function drawTokens() {
    const image = data.images[state.image], map = bytesToMap(image.norms), count = image.grid[0] * image.grid[1];
    byId("norms").replaceChildren(...image.norm_median.map((_, layer) => {
      const { node, canvas } = tile(`${layer + 1}`, false, null), context = canvas.getContext("2d");
      size(canvas, image, 120);
      context.imageSmoothingEnabled = false;
      context.drawImage(cells(map.subarray(layer * count, (layer + 1) * count), image.grid, overlays.patches), 0, 0, ...extent(canvas, image));
      return node;
    }));
    drawLines(byId("norm-chart"), "Length of the longest token and the median after each layer", [{ values: image.norm_maximum, color: "--warm", name: "longest" }, { values: image.norm_median, color: "--dot", name: "median" }], (value) => String(Number(value.toPrecision(3))));
    drawLines(byId("similarity-chart"), "Mean similarity of the tokens after each layer", [{ values: image.similarity, color: "--dot" }], (value) => value.toFixed(1));
  }

  // ---- weights ----

  function drawPositions() {
    if (!data.positions) {
      byId("positions-section").querySelectorAll(".positions, .lead, details").forEach((node) => node.remove());
      byId("positions-note").textContent = "This model has no position embedding per patch.";
      return;
    }
    const { grid: [rows, columns], values } = data.positions, map = bytesToMap(values), count = rows * columns;
    const paint = (value) => [...colorAt(VIRIDIS, value), 255], gap = 2;
    const all = byId("positions"), context = all.getContext("2d"), scale = Math.max(1, Math.floor(900 / (columns * columns)));
    all.width = columns * (columns * scale + gap);
    all.height = rows * (rows * scale + gap);
    context.imageSmoothingEnabled = false;
    for (let position = 0; position < count; position++) {
      const x = (position % columns) * (columns * scale + gap), y = Math.floor(position / columns) * (rows * scale + gap);
      context.drawImage(cells(map.subarray(position * count, (position + 1) * count), [rows, columns], paint), x, y, columns * scale, rows * scale);
    }
    const show = (position) => {
      const one = byId("position"), single = one.getContext("2d");
      one.width = columns * 24;
      one.height = rows * 24;
      single.imageSmoothingEnabled = false;
      single.drawImage(cells(map.subarray(position * count, (position + 1) * count), [rows, columns], paint), 0, 0, one.width, one.height);
      byId("positions-note").textContent = `Row ${Math.floor(position / columns) + 1}, column ${(position % columns) + 1}. Yellow: the same direction. Violet: the least similar of all pairs.${data.positions.note}`;
    };
    const point = (event) => { const cell = cellAt(all, [rows, columns], event); if (cell !== null) show(cell); };
    all.addEventListener("pointermove", point);
    all.addEventListener("click", point);
    show(Math.floor(rows / 2) * columns + Math.floor(columns / 3));
  }
  function drawFilters() {
    const { tiles, explained, of } = data.filters;
    byId("filters-lead").textContent = `The first ${tiles.length} principal components of the ${of}, most important first.`;
    byId("filters").replaceChildren(...tiles.map((src, index) => element("img", { src, alt: `Component ${index + 1}`, title: `Component ${index + 1}: ${percent(explained[index], 1)} of the variance` })));
    byId("filters-note").textContent = `Together they explain ${percent(explained.reduce((a, b) => a + b, 0))} of the variance of all filters.`;
  }
  function drawFaithfulness() {
    const results = Object.entries(data.faithfulness);
    if (!results.length) return;
    byId("faithfulness-section").hidden = false;
    const { fractions, random_curve: random } = results[0][1], colors = ["--warm", "--dot"], xTicks = [0, 0.25, 0.5, 0.75, 1];
    xTicks.format = (value) => percent(value);
    const wide = byId("faithfulness").clientWidth > 640;
    const highest = Math.max(...random, ...results.flatMap(([, result]) => result.curve));
    const { node, x, y } = chart(byId("faithfulness"), { label: "Probability of the predicted class as patches are deleted", xRange: [0, 1], yRange: [0, 1.05 * highest], xTitle: "patches deleted", yTitle: "probability of the predicted class", xTicks, format: (value) => percent(value), width: wide ? 760 : 460, height: 320, top: 44 });
    node.append(svg("path", { class: "dashed", d: path(fractions.map((fraction, index) => [x(fraction), y(random[index])])) }));
    node.append(svg("text", { class: "label", x: 38, y: 29 }, "- -  random order"));
    const sentences = results.map(([name, { curve, score, low, high, images }], index) => {
      node.append(svg("path", { class: "line", style: `stroke: var(${colors[index]})`, d: path(fractions.map((fraction, place) => [x(fraction), y(curve[place])])) }));
      node.append(svg("text", { class: "label", style: `fill: var(${colors[index]})`, x: 170 + 70 * index, y: 29 }, name));
      const interval = low === null ? "" : `, 95% interval ${low.toFixed(3)} to ${high.toFixed(3)}`;
      return `${name}: ${score.toFixed(3)} (${images} image${images > 1 ? "s" : ""}${interval})`;
    });
    const few = results[0][1].low === null ? " These are too few images to compare with chance. Pass at least 10." : "";
    byId("faithfulness-note").textContent = `Area between the curves. ${sentences.join("; ")}.${few}`;
  }
  function drawHeader() {
    const { model } = data, [height, width] = model.patch, sides = model.image_size;
    byId("name").textContent = `Inside ${data.name}`;
    const facts = [[model.layers, "layers"], [model.heads, "heads"], [model.width, "wide"], [height === width ? `${height}` : `${height} x ${width}`, "pixel patches"],
      [sides[0] === sides[1] ? sides[0] : sides.join(" x "), "pixel images"], [(model.parameters / 1e6).toFixed(1), "million parameters"]];
    if (model.registers) facts.push([model.registers, "registers"]);
    byId("facts").replaceChildren(...facts.map(([value, name]) => element("li", {}, element("b", { textContent: value }), ` ${name}`)));
    byId("definitions").replaceChildren(...Object.values(data.definitions).map((textContent) => element("li", { textContent })));
  }

  async function start() {
    drawHeader();
    drawFilters();
    drawPositions();
    drawFaithfulness();
    await Promise.all(photos.map((photo) => photo.decode()));
    tables = await Promise.all(data.images.map((image) => readTable(image.attention)));
    const { extras, grid, layers } = tables[0];
    byId("layer").max = layers.length - 1;
    byId("head").max = data.model.heads - 1;
    Object.assign(state, { layer: layers.length - 1, query: extras.length ? 0 : Math.floor(grid[0] / 2) * grid[1] + Math.floor(grid[1] / 2) });
    listen();
    drawModes();
    drawThumbnails();
    drawGallery();
    drawDistance();
    drawTokens();
    drawAttention();
    window.addEventListener("resize", () => { drawDistance(); drawFaithfulness(); drawAttention(); });
    document.documentElement.dataset.ready = "true";
  }
  start().catch((error) => {
    byId("name").after(element("p", { className: "note", textContent: `This browser cannot draw the page (${error.message}). Use a newer one. The PNG files beside it show the same figures.` }));
  });
})();
