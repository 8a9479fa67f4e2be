// Browsers refuse to start web workers for pages that are opened from files. On such pages, this replaces Worker by a
// class that runs the script in a hidden frame, so that the search works without a server. The script of the theme's
// search recognizes such a frame by the name `IFrameWorker` in its parent.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.scope.importScripts = (...urls) =>
        urls.reduce((earlier, next) => earlier.then(() => this.load(next)), Promise.resolve());
      this.loaded = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.scope.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.scope.document.body.appendChild(script);
      });
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
