"""A headless Chromium through chromedriver, by the WebDriver protocol. Nothing but 127.0.0.1 resolves."""
import base64
import contextlib
import json
import re
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER = "\ue007"


class Browser:
    def __init__(self, address, folder):
        self.address = address
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                     "--disable-background-networking", "--no-first-run", "--window-size=1100,900",
                     "--user-data-dir=" + folder, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        made = self.call("POST", "/session", {"capabilities": {"alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": {"args": arguments},
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"}}}})
        self.session = "/session/" + made["sessionId"]
        self.open("about:blank")
        self.requests()  # those of the browser's own first page

    def call(self, method, path, body=None):
        data = json.dumps(body if body is not None else {}).encode() if method == "POST" else None
        ask = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(ask, timeout=120) as r:
                return json.load(r)["value"]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{path}: {e.read().decode()[:500]}") from None

    def open(self, url):
        self.call("POST", self.session + "/url", {"url": url})

    def run(self, script, *args):
        return self.call("POST", self.session + "/execute/sync", {"script": script, "args": list(args)})

    def find(self, css):
        return self.session + "/element/" + self.call(
            "POST", self.session + "/element", {"using": "css selector", "value": css})[ELEMENT]

    def click(self, css):
        self.call("POST", self.find(css) + "/click")

    def type(self, css, text):
        at = self.find(css)
        self.call("POST", at + "/clear")
        self.call("POST", at + "/value", {"text": text})

    def shown(self, css):
        return self.call("GET", self.find(css) + "/displayed")

    def wait(self, script, what, seconds=30):
        """Until the script's value is true; returns it."""
        end = time.monotonic() + seconds
        while True:
            value = self.run(script)
            if value:
                return value
            if time.monotonic() > end:
                raise AssertionError(f"never: {what}\n" + self.run("return document.body.innerText"))
            time.sleep(0.05)

    def log(self, kind):
        return self.call("POST", self.session + "/se/log", {"type": kind})

    def requests(self):
        """Addresses of all requests since the last call."""
        events = [json.loads(e["message"])["message"] for e in self.log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def picture(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("GET", self.session + "/screenshot")))

    def size(self, width, height):
        self.call("POST", self.session + "/window/rect", {"width": width, "height": height})


@contextlib.contextmanager
def browser():
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = open(folder + "/driver.log", "w+")
        driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            port = None
            for _ in range(1500):
                with open(log.name) as f:
                    port = re.search(r"started successfully on port (\d+)", f.read())
                if port or driver.poll() is not None:
                    break
                time.sleep(0.02)
            assert port, open(log.name).read()
            b = Browser(f"http://127.0.0.1:{port[1]}", folder + "/profile")
            try:
                yield b
            finally:
                b.call("DELETE", b.session)
        finally:
            driver.terminate()
            driver.wait(20)
