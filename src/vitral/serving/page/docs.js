// The API documentation, rendered from openapi.json. Nothing is loaded from another server.

function element(tag, ...content) {
  const made = document.createElement(tag);
  made.append(...content);
  return made;
}

function table(title, rows) {
  if (!rows.length) return "";
  const body = rows.map((cells) => element("tr", ...cells.map((cell) => element("td", cell))));
  const made = element("table", element("caption", title), element("tbody", ...body));
  made.caption.className = "hidden";
  return made;
}

function example(path, method, operation) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  if (method === "get") return `curl ${base}${path}`;
  return operation.requestBody ? `curl --data-binary @photo.jpg ${base}${path}\ncurl -F images=@one.jpg -F images=@two.jpg ${base}${path}` : "";
}

function route(path, method, operation) {
  const tag = element("span", method.toUpperCase());
  tag.className = "method";
  const parameters = (operation.parameters ?? []).map(({ name, description, schema }) => [
    element("code", name), [description ?? schema?.enum?.join(", ") ?? "", "default" in (schema ?? {}) ? `Default: ${schema.default}.` : ""].join(" "),
  ]);
  const statuses = Object.entries(operation.responses).map(([status, { description }]) => [element("code", status), description]);
  const card = element("section", element("h2", tag, path), element("p", operation.description ?? ""),
    element("pre", element("code", example(path, method, operation))), table("Parameters", parameters), table("Responses", statuses));
  card.className = "card";
  return card;
}

const { paths } = await (await fetch("openapi.json")).json();
const cards = Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, operation]) => route(path, method, operation)));
document.getElementById("routes").replaceChildren(...cards);
