// The page: which view is shown, the stream that feeds it, and what happens when it breaks.

import { ApiError, adminKey, events, fetchOk, setAdminKey, withKey } from "./api.js";
import { h, setText } from "./dom.js";
import { age } from "./format.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Usage } from "./usage.js";

const HISTORY = 300;
const LOG = 256;
const RETRY_S = [1, 2, 4, 8, 15];
const REFUSED = [401, 403];
// A page that nobody sees costs the gateway nothing after this.
const LOOK_AWAY_MS = 30_000;

class App {
  constructor() {
    this.main = document.getElementById("main");
    this.banner = document.getElementById("banner");
    this.state = document.getElementById("state");
    this.data = null;
    this.views = {
      overview: new Overview(),
      requests: new Requests(),
      usage: new Usage(),
      playground: new Playground(),
    };
    for (const view of Object.values(this.views)) {
      view.element.hidden = true;
      this.main.append(view.element);
    }
    window.addEventListener("hashchange", () => this.show());
    document.addEventListener("visibilitychange", () => this.lookAway());
    this.show();
    this.follow();
  }

  show() {
    const asked = location.hash.slice(1);
    if (asked === "main") {
      this.main.focus();
      return;
    }
    this.name = asked in this.views ? asked : "overview";
    for (const [name, view] of Object.entries(this.views)) {
      const isShown = name === this.name && !this.signIn;
      view.element.hidden = !isShown;
      view.setVisible?.(isShown && this.data !== null);
    }
    for (const link of document.querySelectorAll("[data-view]")) {
      if (link.dataset.view === this.name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${this.name[0].toUpperCase()}${this.name.slice(1)} · Twinfire`;
    this.draw();
  }

  draw() {
    if (this.data && !document.hidden) this.views[this.name].update?.(this.data);
  }

  async follow() {
    for (let tries = 0; ; tries += 1) {
      let fault = null;
      try {
        await whenVisible();
        this.stream = new AbortController();
        const { signal } = this.stream;
        const response = await fetchOk("dashboard/api/stream", { headers: withKey(adminKey()), signal });
        for await (const { event, data } of events(response)) {
          tries = 0;
          if (event === "snapshot") this.begin(JSON.parse(data));
          else if (event === "frame") this.goOn(JSON.parse(data));
          else throw new Error("The stream broke.");
        }
      } catch (error) {
        if (error instanceof ApiError && REFUSED.includes(error.status)) {
          await this.askForKey(error);
          tries = -1;
          continue;
        }
        if (error.name === "AbortError") continue;
        fault = error;
      }
      await this.waitToRetry(RETRY_S[Math.min(tries, RETRY_S.length - 1)], fault);
    }
  }

  lookAway() {
    clearTimeout(this.lookingAway);
    if (document.hidden) this.lookingAway = setTimeout(() => this.stream?.abort(), LOOK_AWAY_MS);
    else this.draw();
  }

  begin(snapshot) {
    this.closeSignIn();
    this.banner.hidden = true;
    this.data = {
      names: snapshot.model_names,
      history: snapshot.history,
      finished: snapshot.finished,
      now: snapshot.now,
      uptimeS: snapshot.uptime_s,
      beganAt: performance.now(),
    };
    setText(document.getElementById("version"), snapshot.version);
    this.views.playground.setModels(snapshot.model_names);
    this.views.playground.setWorkers(snapshot.now.cluster.workers);
    this.showState();
    this.show();
  }

  goOn({ now, finished }) {
    const data = this.data;
    data.now = now;
    data.history.push({ time_s: now.time_s, points: now.models.map((model) => model.point) });
    if (data.history.length > HISTORY) data.history.splice(0, data.history.length - HISTORY);
    data.finished.push(...finished);
    if (data.finished.length > LOG) data.finished.splice(0, data.finished.length - LOG);
    this.views.playground.setWorkers(now.cluster.workers);
    this.showState();
    this.draw();
  }

  showState() {
    const { now, uptimeS, beganAt } = this.data;
    const reason = now.cluster.unready_reason;
    const up = age(uptimeS + (performance.now() - beganAt) / 1000);
    if (now.is_draining) this.setState("wait", "Shutting down");
    else if (reason) this.setState("bad", reason[0].toUpperCase() + reason.slice(1));
    else if (now.cluster.absent.length) this.setState("wait", "Ready, with workers missing");
    else this.setState("good", "Ready");
    this.state.title = `Up for ${up}`;
  }

  setState(tone, text) {
    this.state.dataset.tone = tone;
    setText(this.state, text);
  }

  async waitToRetry(pauseS, fault) {
    const isDraining = this.data?.now.is_draining;
    const silence = isDraining ? "The gateway is shutting down." : "The gateway does not answer.";
    const why = fault instanceof ApiError ? fault.message : silence;
    const stale = this.data ? " What you see is from before." : "";
    this.setState("bad", "Not connected");
    for (let left = pauseS; left > 0; left -= 1) {
      setText(this.banner, `${why}${stale} Trying again in ${left} s.`);
      this.banner.hidden = false;
      await new Promise((done) => setTimeout(done, 1000));
    }
  }

  askForKey(error) {
    const isFirst = !adminKey();
    setAdminKey("");
    this.setState("wait", "Signed out");
    this.banner.hidden = true;
    return new Promise((done) => {
      const input = h("input", { id: "key", type: "password", autocomplete: "current-password", required: true });
      const enter = (event) => {
        event.preventDefault();
        setAdminKey(input.value.trim());
        done();
      };
      this.signIn?.remove();
      this.signIn = h(
        "form",
        { className: "sign-in panel", onsubmit: enter },
        h("h1", {}, "Sign in"),
        h("p", { role: isFirst ? undefined : "alert" }, error.message),
        h("label", { htmlFor: "key" }, "Key or token"),
        input,
        h("button", { type: "submit", className: "primary" }, "Open the dashboard"),
        h("p", { className: "hint" }, "It is kept in this tab until you close it."),
      );
      this.main.append(this.signIn);
      this.show();
      input.focus();
    });
  }

  closeSignIn() {
    this.signIn?.remove();
    this.signIn = null;
  }
}

function whenVisible() {
  return new Promise((done) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      done();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

new App();
