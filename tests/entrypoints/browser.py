"""Headless Chromium over the DevTools protocol: pages that are typed into and looked at."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import aiohttp

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "ArrowDown": 40}
SHIFT = 8
PATIENCE = 300.0
"""Seconds that anything may take."""


class PageError(AssertionError):
    """The page threw, or did not come to what was waited for."""


class Page:
    """One tab. Each command is answered before the method returns; events are kept."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self.requests: list[str] = []
        """URLs that were asked for."""
        self.errors: list[str] = []
        """What the console shows as an error, and exceptions."""
        browser.pages[session] = self
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def seen(self, method: str, params: dict[str, Any]) -> None:
        """An event of this tab."""
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['source']}: {params['entry']['text']}")

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """→ what JavaScript gives, promises awaited. Raises PageError."""
        reply = self.send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in reply:
            raise PageError(f"{expression}: {json.dumps(reply['exceptionDetails'])[:600]}")
        return reply["result"].get("value")

    def until(self, condition: str, seconds: float = PATIENCE) -> None:
        """Wait, inside the page, until the condition holds. Raises PageError."""
        value = self.value(
            f"""new Promise((resolve) => {{
                const deadline = performance.now() + {seconds * 1000};
                const look = () => {{
                    let holds = false;
                    try {{ holds = {condition}; }} catch {{}}
                    if (holds) resolve(true);
                    else if (performance.now() > deadline) resolve(false);
                    else setTimeout(look, 5);
                }};
                look();
            }})"""
        )
        if not value:
            raise PageError(
                f"never came true: {condition}\n{self.value('document.body.innerText')}"
            )

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        modifiers = SHIFT if shift else 0
        text = {"Enter": "\r", " ": " "}.get(key)
        with_text = {"text": text} if text else {}
        kind = "keyDown" if text else "rawKeyDown"
        self.send("Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **about, **with_text)
        self.send("Input.dispatchKeyEvent", type="keyUp", modifiers=modifiers, **about)

    def shape(self, width: int, height: int, scheme: str = "light", scale: float = 1) -> None:
        """A window's size in CSS pixels, and the system's colour scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def screenshot(self) -> bytes:
        """→ PNG"""
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)
        del self._browser.pages[self._session]


class Browser:
    """One browser process. It may be told and heard on one connection, on a loop of its own."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self._loop = asyncio.new_event_loop()
        self._number = 0

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[Browser]:
        """Raises RuntimeError when there is no browser in time. It is killed at the end."""
        assert CHROMIUM is not None
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            process = subprocess.Popen(
                [
                    CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu",
                    "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
                    "--disable-background-networking", "--disable-component-update",
                    "--hide-scrollbars", "--remote-debugging-port=0",
                    "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
                    f"--user-data-dir={profile}", "about:blank",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )  # fmt: skip
            reader = threading.Thread(target=_listen, args=(process, lines := queue.Queue()))
            browser = cls()
            try:
                reader.start()
                try:
                    address = lines.get(timeout=PATIENCE)
                except queue.Empty:
                    address = None
                if address is None:
                    raise RuntimeError(f"{CHROMIUM} did not start")
                browser._run(browser._connect(address))
                yield browser
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(PATIENCE)
                reader.join(PATIENCE)
                with contextlib.suppress(Exception):
                    browser._run(browser._client.close())
                browser._loop.close()

    def page(self) -> Page:
        """A new tab that shares nothing with the others."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        return Page(self, target["targetId"], attached["sessionId"])

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        return self._run(self._exchange(method, session, params))

    async def _connect(self, address: str) -> None:
        self._client = aiohttp.ClientSession()
        async with asyncio.timeout(PATIENCE):
            self._socket = await self._client.ws_connect(address, max_msg_size=0)

    async def _exchange(
        self, method: str, session: str | None, params: dict[str, Any]
    ) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        # Around all of it: a page that looks at the metrics never stops telling of its requests.
        async with asyncio.timeout(PATIENCE + 5):
            await self._socket.send_json(message)
            while True:
                heard = await self._socket.receive_json()
                if heard.get("id") == number:
                    if "error" in heard:
                        raise PageError(f"{method}: {heard['error']}")
                    return heard["result"]
                page = self.pages.get(heard.get("sessionId", ""))
                if page is not None and "method" in heard:
                    page.seen(heard["method"], heard["params"])

    def _run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)


def _listen(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    """Read what the browser says until it ends (a full pipe would stop it); keep its address."""
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if line.startswith("DevTools listening on "):
                lines.put(line.removeprefix("DevTools listening on ").strip())
    lines.put(None)
