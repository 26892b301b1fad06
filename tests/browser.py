"""A headless Chromium for tests: ``chromedriver``, driven over its HTTP protocol with the standard library alone."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

# A slow machine starts a browser in tens of seconds.
_TIMEOUT = 180
_FLAGS = (
    "--headless",
    "--no-sandbox",  # which root cannot use
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
)


class Unavailable(Exception):
    """There is no browser that works; the text says why."""


class Browser:
    """One session of a headless Chromium with an empty profile in a folder."""

    def __init__(self, folder: Path) -> None:
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium") or shutil.which("chromium-browser")
        if driver is None or chromium is None:
            raise Unavailable("chromium or chromedriver is not installed (Debian: chromium, chromium-driver)")
        log = folder / "chromedriver.log"
        # Port 0 lets the system choose a free port; the driver prints its number.
        self._process = subprocess.Popen(
            [driver, "--port=0", f"--log-path={log}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "HOME": str(folder)},
        )
        self._events: list[dict[str, Any]] = []
        try:
            self._address = f"http://127.0.0.1:{self._port()}"
            options = {"binary": chromium, "args": [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }
            answer = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
            self._session = f"/session/{answer['sessionId']}"
        except (OSError, Unavailable) as error:
            self._stop()
            raise Unavailable(f"chromium does not start: {error}") from error

    def open(self, path: Path) -> None:
        """Load a file and wait until it is complete."""
        self._navigate(path.as_uri())

    def seconds_to_open(self, path: Path) -> float:
        """Load a file; return the processor time of the thread that parses, lays out and runs scripts, up to now."""
        self.open_blank()
        self.command("Performance.enable", timeDomain="threadTicks")
        self.open(path)
        self.widths()  # waits for the layout
        metrics = self.command("Performance.getMetrics")["metrics"]
        self.command("Performance.disable")
        return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))

    def open_blank(self) -> None:
        """Leave the page, and the pages that the browser itself shows at first."""
        self._navigate("about:blank")

    def _navigate(self, address: str) -> None:
        """Load an address and wait for its load event: the driver can return while the page is still parsed."""
        self._events = []
        self.log("performance")
        self._call("POST", f"{self._session}/url", {"url": address})
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            self._events += self._new_events()
            arrived = False
            for event in self._events:
                if event["method"] == "Page.frameNavigated":
                    arrived |= event["params"]["frame"]["url"] == address
                elif event["method"] == "Page.loadEventFired" and arrived:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{address} is not complete after {_TIMEOUT} seconds.")

    def _new_events(self) -> list[dict[str, Any]]:
        return [json.loads(entry["message"])["message"] for entry in self.log("performance")]

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a function in the page and return its value."""
        body = {"script": script, "args": list(arguments)}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def command(self, name: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": parameters})

    def view(self, width: int, scheme: str = "light", scripts: bool = True, height: int = 900) -> None:
        """Set the width of the window in pixels, the colour scheme and whether scripts run."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.command("Emulation.setEmulatedMedia", features=[feature])
        self.command("Emulation.setScriptExecutionDisabled", value=not scripts)

    def widths(self) -> tuple[int, int]:
        """Widths of the window and of the page in pixels, without a script.

        A page that has just been loaded can still be without a layout: its size is then zero.
        """
        deadline = time.monotonic() + _TIMEOUT
        while time.monotonic() < deadline:
            metrics = self.command("Page.getLayoutMetrics")
            if metrics["cssContentSize"]["height"] > 0:
                return metrics["cssLayoutViewport"]["clientWidth"], metrics["cssContentSize"]["width"]
            time.sleep(0.05)
        raise TimeoutError(f"The page has no layout after {_TIMEOUT} seconds.")

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Entries of the log "browser" (console) or "performance" (network) since the last call."""
        return list(self._call("POST", f"{self._session}/se/log", {"type": kind}))

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        self._events += self._new_events()
        asked = (event["params"] for event in self._events if event["method"] == "Network.requestWillBeSent")
        return [parameters["request"]["url"] for parameters in asked]

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a picture of the page."""
        picture = self.command("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        """End the browser and its driver."""
        try:
            self._call("DELETE", self._session)
        finally:
            self._stop()

    def _port(self) -> int:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return int(found[1])
        raise Unavailable("chromedriver ended before it listened")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self._address}{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json"},
        )
        # No proxy of the environment stands between this process and its own child.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_TIMEOUT) as answer:
            return json.load(answer)["value"]

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
