// The page: read images from a drop, a paste, a file dialog or the camera, send each to the API, and show the results.
// Names of files and labels come from anywhere: they are only ever set as text.

import { AttentionMap } from "./overlay.js";

const SENT_AT_ONCE = 4;
const MAX_TRIES = 6;
const MAX_LABELS_SHOWN = 1000;

const $ = (id) => document.getElementById(id);
const state = { model: null, items: [], current: null, token: null, running: 0, waiting: [] };
const map = new AttentionMap({ send, item: () => state.current, model: () => state.model });

// ---- requests ----

async function send(path, options = {}) {
  const headers = state.token ? { Authorization: `Bearer ${state.token}` } : {};
  for (let tries = 1; ; tries++) {
    const response = await fetch(path, { ...options, headers });
    if (![429, 503].includes(response.status) || tries >= MAX_TRIES) return response;
    const seconds = Math.min(10, Number(response.headers.get("Retry-After")) || 1);
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds * (0.75 + Math.random() / 2)));
  }
}

async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server returned status ${response.status}.`;
  }
}

// ---- the model ----

async function loadModel(name) {
  const response = await send(`api/model${name ? `?model=${encodeURIComponent(name)}` : ""}`);
  $("token-form").hidden = response.status !== 401;
  if (response.status === 401) {
    $("token-error").textContent = state.token ? "The token is wrong." : "";
    $("token").focus();
    return;
  }
  if (!response.ok) {
    announce(await problemOf(response));
    return;
  }
  state.model = await response.json();
  showModel(state.model);
  if (!name) await loadModels();
}

async function loadModels() {
  const { models } = await (await send("api/models")).json();
  $("switch-model").hidden = models.length < 2;
  $("model-name").hidden = models.length > 1;
  $("model").replaceChildren(...models.map((name) => new Option(name, name)));
}

function showModel(model) {
  document.title = `${model.name} · vitral`;
  $("model-name").textContent = model.name;
  const limits = model.limits;
  const formats = limits.formats.map((name) => ({ WEBP: "WebP" })[name] ?? name);
  const most = `${formats.slice(0, -1).join(", ")} or ${formats.at(-1)}, up to ${megabytes(limits.body_bytes)}`;
  $("limits-hint").textContent = `${most} and ${Math.round(limits.pixels / 1e6)} million pixels each`;
  const [height, width] = model.image_size;
  const preprocess = model.preprocess;
  const resized = { crop: "resize, then crop the center", squash: "resize to fit, without keeping the aspect ratio",
    pad: "resize and add a border", native: "keep the aspect ratio" }[preprocess.resize] ?? preprocess.resize;
  const facts = [
    ["Network", `${model.architecture}, ${model.parameters ? `${model.layers || "no"} layers, ${(model.parameters / 1e6).toFixed(1)} million parameters` : "layers unknown"}`],
    ["Input", `${width} × ${height} pixels, ${preprocess.channels} channels`],
    ["Preprocessing", `${resized}; ${preprocess.interpolation}${preprocess.antialias ? " with antialiasing" : ""}`],
    ["Mean and standard deviation", `${preprocess.mean.map(rounded).join(", ")} and ${preprocess.std.map(rounded).join(", ")}`],
    ["Runs on", `${model.device}, ${model.precision}, ${model.engine}`],
    ["Unusual images", model.can_detect_unusual ? `marked if more unusual than ${rounded(100 * model.reject)}% of ordinary ones` : "not detected by this model"],
    ["Limits", `${most}, ${limits.pixels / 1e6} million pixels, sides up to ${limits.side} pixels`],
  ];
  $("facts").replaceChildren(...facts.flatMap(([term, text]) => [element("dt", term), element("dd", text)]));
  $("labels-title").textContent = model.labels.length ? `${model.labels.length} labels` : "No labels: this model has features only";
  const more = model.labels.length - MAX_LABELS_SHOWN;
  const shown = [...model.labels.slice(0, MAX_LABELS_SHOWN), ...(more > 0 ? [`and ${more} more`] : [])];
  $("labels").replaceChildren(...shown.map((label) => element("li", label)));
  map.setModel(model);
}

// ---- images ----

function addFiles(files) {
  const images = [...files];
  if (!images.length || !state.model) return;
  for (const file of images) {
    const item = { file, name: file.name || "pasted image", url: URL.createObjectURL(file), result: null, error: null };
    state.items.push(item);
    addRow(item);
    state.waiting.push(item);
  }
  $("drop").classList.add("small");
  $("many").hidden = state.items.length < 2;
  select(state.items[state.items.length - images.length]);
  work();
}

function work() {
  while (state.running < SENT_AT_ONCE && state.waiting.length) {
    state.running++;
    const item = state.waiting.shift();
    const model = state.model;
    Promise.all([classify(item, model), drawPreview(item)]).then(([outcome]) => {
      state.running--;
      if (model === state.model) Object.assign(item, outcome); // else the other model classifies it again
      showRow(item);
      if (item === state.current) showResult(item);
      report();
      work();
    });
  }
  report();
}

async function classify({ file }, model) {
  const limit = model.limits.body_bytes;
  if (file.size > limit) return { error: `The file has ${megabytes(file.size)}; the limit is ${megabytes(limit)}.` };
  if (!model.can_predict) return { result: { label: "No labels: this model has features only", top: [], probability: null } };
  try {
    const response = await send(`api/predict?model=${encodeURIComponent(model.name)}`, { method: "POST", body: file });
    return response.ok ? { result: (await response.json()).predictions[0] } : { error: await problemOf(response) };
  } catch {
    return { error: "The server did not respond." };
  }
}

function report() {
  const open = state.running + state.waiting.length;
  const done = state.items.length - open;
  const failed = state.items.filter((item) => item.error).length;
  const failures = failed ? `, ${failed} failed` : "";
  if (open) announce(state.items.length > 1 ? `${done} of ${state.items.length} images` : "Looking at the image");
  else announce(state.items.length > 1 ? `${done} images${failures}` : "");
}

function announce(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

// ---- one result ----

function select(item) {
  state.current = item;
  $("result").hidden = false;
  $("image").src = item.url;
  $("image").alt = item.name;
  for (const other of state.items) other.row.classList.toggle("current", other === item);
  showResult(item);
}

function showResult(item) {
  const { result, error } = item;
  const size = result?.width ? `, ${result.width} × ${result.height} pixels` : "";
  $("caption").textContent = item.name + size;
  $("failure").hidden = !error;
  $("failure").textContent = error ?? "";
  $("unusual").hidden = !result?.rejected;
  $("bars").replaceChildren(...(result ? result.top.map(bar) : []));
  $("result-title").textContent = error ? "This image cannot be used" : result ? headline(result) : "Looking at the image";
  if (result?.rejected) {
    const text = `This image is more unusual than ${percent(result.unusual)} of ordinary images. It may show none of the labels.`;
    $("unusual").textContent = `${text} The closest ones:`;
  }
  map.show(result ? item : null);
}

const headline = (result) => (result.rejected ? "None of these" : result.label);

function bar({ label, probability }) {
  const row = document.createElement("li");
  const fill = element("span", "", "fill");
  fill.style.width = `${Math.max(0.5, 100 * probability)}%`;
  row.append(fill, element("span", label, "label"), element("span", percent(probability), "number"));
  return row;
}

// ---- many results ----

function addRow(item) {
  item.row = document.createElement("tr");
  item.preview = document.createElement("canvas");
  item.preview.width = item.preview.height = 88;
  item.preview.setAttribute("aria-hidden", "true");
  const choose = element("button", item.name);
  choose.type = "button";
  choose.addEventListener("click", () => {
    select(item);
    $("result").scrollIntoView({ block: "nearest" });
    $("result-title").focus({ preventScroll: true });
  });
  const cells = [item.preview, choose, "", ""].map((content) => {
    const cell = document.createElement("td");
    cell.append(content);
    return cell;
  });
  cells[2].textContent = "waiting";
  cells[3].className = "number";
  item.row.append(...cells);
  $("rows").append(item.row);
}

async function drawPreview({ file, preview: canvas }) {
  try {
    const bitmap = await createImageBitmap(file);
    const side = Math.min(bitmap.width, bitmap.height);
    const [left, top] = [(bitmap.width - side) / 2, (bitmap.height - side) / 2];
    canvas.getContext("2d").drawImage(bitmap, left, top, side, side, 0, 0, canvas.width, canvas.height);
    bitmap.close();
  } catch {
    // the server reports unusable files
  }
}

function showRow({ row, result, error }) {
  if (!result && !error) return;
  const [, , label, probability] = row.children;
  label.textContent = error ?? headline(result);
  label.className = error ? "error-cell" : result.rejected ? "unusual-cell" : "";
  probability.textContent = result?.top.length && !result.rejected ? percent(result.probability) : "";
}

function clear() {
  for (const item of state.items) URL.revokeObjectURL(item.url);
  Object.assign(state, { items: [], waiting: [], current: null });
  $("rows").replaceChildren();
  $("many").hidden = $("result").hidden = true;
  $("drop").classList.remove("small");
  announce("");
  $("choose").focus();
}

function download() {
  const width = Math.max(1, ...state.items.map(({ result }) => result?.top.length ?? 0));
  const names = Array.from({ length: width }, (_, k) => (k ? [`label_${k + 1}`, `probability_${k + 1}`] : ["label", "probability"]));
  const rows = state.items.map(({ name, result, error }) => {
    const top = (result?.top ?? []).flatMap(({ label, probability }) => [label, probability.toFixed(6)]);
    return [name, ...top, ...Array(2 * width - top.length).fill(""), result?.unusual?.toFixed(6) ?? "", error ?? ""];
  });
  const lines = [["file", ...names.flat(), "unusual", "error"], ...rows].map((cells) => cells.map(csvCell).join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/csv" }));
  link.download = "labels.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

function csvCell(value) {
  const text = /^[=+@\t\r-]/.test(value) ? `'${value}` : String(value); // a spreadsheet would run it as a formula
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

// ---- camera ----

async function openCamera() {
  try {
    $("video").srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    $("camera-panel").hidden = false;
    $("shoot").focus();
  } catch {
    announce("The camera is not available, or the browser does not allow it.");
  }
}

function closeCamera() {
  for (const track of $("video").srcObject?.getTracks() ?? []) track.stop();
  $("video").srcObject = null;
  $("camera-panel").hidden = true;
  $("camera").focus();
}

function takePhoto() {
  const video = $("video");
  const canvas = Object.assign(document.createElement("canvas"), { width: video.videoWidth, height: video.videoHeight });
  if (!canvas.width) return;
  canvas.getContext("2d").drawImage(video, 0, 0);
  canvas.toBlob((blob) => {
    const time = new Date().toLocaleTimeString();
    addFiles([new File([blob], `photo ${time}.jpg`, { type: "image/jpeg" })]);
    closeCamera();
  }, "image/jpeg", 0.95);
}

// ---- small things ----

function element(tag, text, className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function percent(value) {
  if (value > 0.99995) return ">99.99%";
  if (value > 0 && value < 0.00005) return "<0.01%";
  return `${(100 * value).toFixed(value > 0.9995 || value < 0.0995 ? 2 : 1)}%`;
}
const rounded = (value) => Number(value.toFixed(3));
const megabytes = (bytes) => `${Number((bytes / 2 ** 20).toFixed(1))} MiB`;

// ---- events ----

$("choose").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", (event) => {
  addFiles(event.target.files);
  event.target.value = "";
});
document.addEventListener("paste", (event) => addFiles(event.clipboardData?.files ?? []));
for (const name of ["dragenter", "dragover"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => event.relatedTarget ?? $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  addFiles(event.dataTransfer?.files ?? []);
});
$("camera").hidden = !navigator.mediaDevices?.getUserMedia;
$("camera").addEventListener("click", openCamera);
$("close-camera").addEventListener("click", closeCamera);
$("shoot").addEventListener("click", takePhoto);
$("download").addEventListener("click", download);
$("clear").addEventListener("click", clear);
$("model").addEventListener("change", async (event) => {
  await loadModel(event.target.value);
  for (const item of state.items) {
    Object.assign(item, { result: null, error: null, maps: null });
    Object.assign(item.row.children[2], { textContent: "waiting", className: "" });
    item.row.children[3].textContent = "";
  }
  state.waiting = [...state.items];
  if (state.current) showResult(state.current);
  work();
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = $("token").value;
  loadModel();
});
loadModel();
