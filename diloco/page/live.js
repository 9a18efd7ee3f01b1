// Keeps the sections of a page as the server has them, from its stream of those that changed.
// Nodes are changed in place: focus, selection and scrolling stay where they are.

function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.nodeName === "SELECT" && old.contains(document.activeElement)) return;
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  before.forEach((child, i) => (i < after.length ? patch(child, after[i]) : child.remove()));
  old.append(...after.slice(before.length));
}

function show(sections) {
  for (const [id, html] of Object.entries(sections)) {
    const section = document.getElementById(id);
    const fresh = new DOMParser().parseFromString(`<section id="${id}">${html}</section>`, "text/html");
    if (section) patch(section, fresh.body.firstChild);
  }
}

const link = document.getElementById("link");
const button = document.createElement("button");
const said = document.createElement("span");
said.setAttribute("role", "status");
link.append(button, " ", said);
let stream = null;

function say(text) {
  if (said.textContent !== text) said.textContent = text;
}

function start() {
  button.textContent = "Pause updates";
  say("");
  stream = new EventSource(`${location.pathname}/live${location.search}`);
  stream.onmessage = (event) => {
    say("live");
    show(JSON.parse(event.data));
  };
  stream.onerror = () => {
    const isOver = stream.readyState === EventSource.CLOSED;
    say(isOver ? "no longer live: load the page again" : "not connected, trying again");
  };
}

function stop() {
  stream.close();
  stream = null;
  button.textContent = "Update again";
  say("paused");
}

button.addEventListener("click", () => (stream ? stop() : start()));
addEventListener("pagehide", () => stream?.close());
addEventListener("pageshow", (event) => event.persisted && stream && start());
// A browser has six connections to a server, for all its tabs: those that nobody sees leave theirs.
document.addEventListener("visibilitychange", () => {
  if (!stream) return;
  if (document.hidden) stream.close();
  else start();
});
start();
if (document.hidden) stream.close();
