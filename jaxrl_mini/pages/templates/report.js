"use strict";
// Shows a policy at the chosen iteration: every element with data-i takes its number from the frame, in thousandths.
const percent = (thousandths) => (thousandths / 10).toFixed(1);
const bandWidth = (thousandths) => (thousandths ? 0.8 + 0.026 * thousandths : 0);

for (const section of document.querySelectorAll(".policy")) {
  const data = JSON.parse(section.querySelector("script").textContent);
  const [slider, button, output] = ["input", "button", "output"].map((name) => section.querySelector(name));
  const likeliest = section.querySelector(".likeliest");
  const elements = section.querySelectorAll("[data-i]");
  let timer = null;

  const show = (place) => {
    const frame = data.frames[place];
    for (const element of elements) {
      const value = frame[element.dataset.i];
      const kind = element.dataset.kind;
      if (kind === "band") element.setAttribute("stroke-width", bandWidth(value));
      else if (kind === "exit") element.textContent = value ? element.dataset.sign + " " + percent(value) : "";
      else if (kind !== "box") element.textContent = percent(value);
      if (kind === "box" || kind === "cell") element.setAttribute("class", "p" + Math.round(value / 100));
    }
    const [probability, actions] = data.likeliest[place];
    likeliest.textContent = `${[...actions].map((action) => data.actions[action]).join(" → ")} (${probability.toFixed(1)} %)`;
    const total = data.iterations[data.iterations.length - 1];
    output.textContent = `${data.iterations[place]} of ${total}`;
    slider.setAttribute("aria-valuetext",
      `after ${data.iterations[place]} iterations, success ${percent(frame[data.success])} percent`);
  };

  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  };

  const play = () => {
    if (slider.valueAsNumber >= data.frames.length - 1) move(-Infinity);
    button.textContent = "Pause";
    timer = setInterval(() => {
      move(1);
      if (slider.valueAsNumber >= data.frames.length - 1) stop();
    }, Math.max(40, Math.min(120, 12000 / data.frames.length)));
  };

  const move = (by) => {
    slider.valueAsNumber = Math.min(data.frames.length - 1, Math.max(0, slider.valueAsNumber + by));
    show(slider.valueAsNumber);
  };

  slider.addEventListener("input", () => {
    if (timer) stop();
    show(slider.valueAsNumber);
  });
  button.addEventListener("click", () => (timer ? stop() : play()));
  button.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    if (timer) stop();
    move(by);
  });
  section.querySelector(".controls").hidden = false;
  slider.valueAsNumber = data.frames.length - 1;
  show(slider.valueAsNumber);
}
