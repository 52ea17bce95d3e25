// Draw attention maps over the image: fetched once per image and method, then chosen by sliders.

const $ = (id) => document.getElementById(id);
const INFERNO = [[4, 3, 18], [38, 12, 81], [89, 16, 110], [140, 41, 99], [188, 55, 84], [227, 89, 51], [249, 140, 10], [249, 201, 50], [252, 255, 200]];
const NAMES = { attention: "Attention of a layer", rollout: "Rollout of all layers", relevance: "Relevance for the label" };

export class AttentionMap {
  constructor({ send, item, model }) {
    Object.assign(this, { send, item, model, shown: null });
    $("show-map").addEventListener("change", () => this.update());
    $("method").addEventListener("change", () => this.update());
    for (const id of ["layer", "head", "strength"]) $(id).addEventListener("input", () => this.draw());
    new ResizeObserver(() => this.draw()).observe($("image"));
    $("image").addEventListener("load", () => this.draw());
  }

  setModel(model) {
    $("maps").hidden = !model.methods.length;
    $("method").replaceChildren(...model.methods.map((name) => new Option(NAMES[name] ?? name, name)));
    $("method-row").hidden = model.methods.length < 2;
    $("layer").max = Math.max(1, model.layers);
    $("layer").value = $("layer").max; // after its maximum, which clamps it
    $("head").max = model.heads;
    $("head").value = 0;
  }

  show(item) {
    this.shown = item;
    $("maps").hidden = !item || !this.model().methods.length;
    this.update();
  }

  async update() {
    const on = $("show-map").checked && this.shown;
    $("map-controls").hidden = !$("show-map").checked;
    $("sliders").hidden = $("method").value !== "attention";
    $("overlay").hidden = true;
    $("image").style.filter = "";
    if (!on) return;
    const [item, method] = [this.shown, $("method").value];
    item.maps ??= {};
    item.maps[method] ??= this.fetchMaps(item, method);
    const maps = await item.maps[method];
    if (item === this.shown && method === $("method").value) this.draw(maps);
  }

  async fetchMaps(item, method) {
    const query = `model=${encodeURIComponent(this.model().name)}&method=${encodeURIComponent(method)}`;
    try {
      const response = await this.send(`api/attention?${query}`, { method: "POST", body: item.file });
      if (response.ok) return await response.json();
    } catch {
      // the server is gone; as with an error, the next try fetches again
    }
    if (item.maps) item.maps[method] = undefined;
    $("status").textContent = "The attention map could not be computed.";
    return null;
  }

  draw(maps = this.drawn) {
    this.drawn = maps;
    const [layer, head] = [Number($("layer").value), Number($("head").value)];
    $("layer-value").textContent = `${layer} of ${$("layer").max}`;
    $("head-value").textContent = head ? `${head} of ${$("head").max}` : "mean of all";
    $("strength-value").textContent = `${$("strength").value}%`;
    const isWanted = maps && this.shown?.maps && $("show-map").checked && $("image").clientWidth;
    $("overlay").hidden = !isWanted;
    const strength = isWanted ? Number($("strength").value) / 100 : 0;
    $("image").style.filter = strength ? `grayscale(${strength})` : ""; // the colors of a photo would mix with those of the map
    if (!isWanted) return;
    const values = maps.map ?? chooseHead(maps.layers[layer - 1].heads, head);
    paint($("overlay"), $("image"), values, maps.box, strength);
    const what = maps.map ? NAMES[maps.method] : `Attention of layer ${layer}, ${head ? `head ${head}` : "mean of all heads"}`;
    $("overlay").setAttribute("aria-label", `${what}: strongest in the ${strongest(values)} of the image`);
  }
}

function chooseHead(heads, head) {
  if (head) return heads[head - 1];
  return heads[0].map((row, y) => row.map((_, x) => heads.reduce((sum, map) => sum + map[y][x], 0) / heads.length));
}

// Warm and bright where the model looks, dark where it does not. A few extreme patches do not hide the others.
function paint(canvas, image, values, box, strength) {
  const [width, height] = [image.clientWidth, image.clientHeight];
  const scale = Math.min(2, window.devicePixelRatio || 1);
  Object.assign(canvas, { width: width * scale, height: height * scale });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px`, left: `${image.offsetLeft}px`, top: `${image.offsetTop}px` });
  const small = Object.assign(document.createElement("canvas"), { width: values[0].length, height: values.length });
  const pixels = new ImageData(small.width, small.height);
  const sorted = values.flat().sort((one, other) => one - other);
  const most = Math.max(1e-9, sorted[Math.floor(0.98 * (sorted.length - 1))] || sorted.at(-1));
  values.flat().forEach((value, at) => {
    const level = Math.min(1, value / most);
    pixels.data.set([...colorAt(0.12 + 0.88 * level), 255 * strength * (0.35 + 0.6 * level)], 4 * at);
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  const context = canvas.getContext("2d");
  const [fullWidth, fullHeight] = shownSize(image);
  const [left, top] = [(width - fullWidth) / 2, (height - fullHeight) / 2];
  context.scale(scale, scale);
  context.fillStyle = `rgb(4 3 18 / ${60 * strength}%)`;
  context.fillRect(left, top, fullWidth, fullHeight); // outside of what the model sees
  const seen = [left + box.left * fullWidth, top + box.top * fullHeight, box.width * fullWidth, box.height * fullHeight];
  context.clearRect(...seen);
  context.imageSmoothingQuality = "high";
  context.beginPath();
  context.rect(left, top, fullWidth, fullHeight);
  context.clip();
  context.drawImage(small, ...seen);
}

function colorAt(value) {
  const place = Math.min(0.9999, value) * (INFERNO.length - 1), low = Math.floor(place), part = place - low;
  return INFERNO[low].map((from, channel) => from + part * (INFERNO[low + 1][channel] - from));
}

// The size of the image inside its element, which object-fit may leave larger.
function shownSize(image) {
  const ratio = Math.min(image.clientWidth / image.naturalWidth, image.clientHeight / image.naturalHeight);
  return [image.naturalWidth * ratio, image.naturalHeight * ratio];
}

function strongest(values) {
  const flat = values.flat();
  const at = flat.indexOf(Math.max(...flat));
  const part = (index, count, names) => names[Math.min(2, Math.floor((3 * index) / count))];
  const row = part(Math.floor(at / values[0].length), values.length, ["top", "middle", "bottom"]);
  const column = part(at % values[0].length, values[0].length, ["left", "center", "right"]);
  return `${row} ${column}`;
}
