"""The page at / in a headless browser: a chat, streaming, stop, settings, the live line, errors, escaping,
and not one request to anywhere else. PICTURES=FOLDER: keep pictures of it."""
import os
import re
import shutil
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from browser import ENTER, browser
from serving import MARKUP, server, write_model

TURNS = "[...document.querySelectorAll('.turn')]"
ANSWER = f"{TURNS}.filter(t => t.classList.contains('assistant')).pop()"
IDLE = "return document.getElementById('stop').hidden && !document.getElementById('send').hidden"
NOTE = f"return {ANSWER}.querySelector('.note').textContent"
LIVE = "return document.getElementById('live').textContent"


def picture(b, name):
    if os.environ.get("PICTURES"):
        b.picture(os.path.join(os.environ["PICTURES"], name + ".png"))


def say(b, text):
    b.type("#input", text + ENTER)


def done(b):
    b.wait(IDLE, "the end of the answer")
    return b.run(f"return [...{ANSWER}.children].map(c => c.textContent)")[1]


def setting(b, name, value):
    if not b.shown("#settings"):
        b.click("#toggle")
    b.type("#" + name, value)
    b.run("document.activeElement.blur()")


def loads(b, address):
    b.open(address + "/")
    b.wait("return document.getElementById('model').textContent === 'page'", "the model's name")
    assert b.run("return document.activeElement.id") == "input"
    facts = b.run("return document.getElementById('facts').textContent")
    assert re.fullmatch(r"llama · gguf f32 · \S+ · context 32768", facts), facts
    picture(b, "empty")
    assert re.match(r"0\.0 tokens/s · prompt 0/s · batch 0 of 4 · queue 0 · cache hits 0 of 0 · buffers a token –",
                    b.wait(LIVE, "the live line"))


def chats(b):
    say(b, "A")
    assert done(b) == "Hello world!"
    note = b.run(NOTE)
    assert re.match(r"4 tokens, [\d.]+ a second; prompt 7, of it cached 0$", note), note
    say(b, "and again A")
    assert done(b) == "Hello world!"
    # the conversation is the prompt, and a new chat forgets it
    assert int(re.search(r"prompt (\d+)", b.run(NOTE))[1]) > 30
    picture(b, "chat")
    b.click("#clear")
    assert b.run(f"return {TURNS}.length") == 0
    say(b, "A")
    assert done(b) == "Hello world!" and "prompt 7," in b.run(NOTE)
    b.click("#clear")


def keys(b):
    # Shift+Enter is a new line, blanks are no message
    b.type("#input", "one\ue008" + ENTER + "\ue000two A")
    assert b.run("return document.getElementById('input').value") == "one\ntwo A"
    b.click("#send")
    assert done(b) == "Hello world!"
    say(b, "   ")
    assert b.run(f"return {TURNS}.length") == 2
    b.click("#clear")


def escapes(b):
    say(b, "<img src=x onerror=\"window.owned = 1\"><b>M</b> M")
    assert done(b) == MARKUP
    assert b.run("return document.querySelectorAll('#chat b, #chat img, #chat script').length") == 0
    assert b.run("return window.owned") is None and b.run("return document.title") == "mlxcel"
    b.click("#clear")


def stops(b):
    # the lengths of the answer that could be seen
    b.run("window.seen = new Set(); new MutationObserver(() => { const t = document.querySelector('.assistant');"
          "if (t) seen.add(t.children[1].textContent.length); }).observe(document.getElementById('chat'),"
          "{ childList: true, subtree: true, characterData: true })")
    say(b, "y")  # answered by y until the context is full
    b.wait("return seen.size > 20", "an answer that grows")
    assert not b.shown("#send")
    b.wait("return /batch 1 of 4/.test(document.getElementById('live').textContent)", "the batch")
    live = b.wait("const t = document.getElementById('live').textContent;"
                  "return /buffers a token \\d/.test(t) && t", "buffers a token")
    assert float(live.split()[0]) > 1, live
    picture(b, "running")
    b.click("#stop")
    assert set(done(b)) == {"y"} and b.run(NOTE) == "stopped"
    b.wait("return /batch 0 of 4/.test(document.getElementById('live').textContent)", "the free place")
    assert re.search(r"cache hits \d+ of [1-9]", b.run(LIVE))
    # a new chat while one runs
    b.click("#clear")
    say(b, "y")
    b.wait(f"return {ANSWER}.children[1].textContent.length > 20", "some of the answer")
    b.click("#clear")
    assert b.run(IDLE) and b.run(f"return {TURNS}.length") == 0
    say(b, "A")
    assert done(b) == "Hello world!" and "prompt 7," in b.run(NOTE)
    b.click("#clear")


def settings(b, address):
    setting(b, "max_tokens", "2")
    setting(b, "system", "be brief")
    setting(b, "key", "hush")
    picture(b, "settings")
    say(b, "A")
    assert done(b) == "Hello wor"
    assert re.match(r"2 tokens, .*; prompt 23, .*; cut at its longest", b.run(NOTE)), b.run(NOTE)
    b.open(address + "/")  # they stay, but for the key
    value = lambda name: b.run(f"return document.getElementById('{name}').value")
    assert (value("max_tokens"), value("system"), value("key")) == ("2", "be brief", "")
    setting(b, "max_tokens", "")
    setting(b, "system", "")
    b.click("#toggle")
    assert not b.shown("#settings")


def errors(b):
    setting(b, "top_p", "7")
    say(b, "A")
    done(b)
    assert b.run(NOTE) == "top_p: expected a number from 0 to 1", b.run(NOTE)
    assert b.run(f"return getComputedStyle({ANSWER}.querySelector('.note')).color") == "rgb(220, 38, 38)"
    setting(b, "top_p", "")
    b.click("#toggle")
    # the message that failed is not part of the conversation, and can be sent again
    assert b.run("return document.getElementById('input').value") == "A"
    b.click("#send")
    assert done(b) == "Hello world!" and "prompt 7," in b.run(NOTE), b.run(NOTE)
    picture(b, "error")


def asks_for_a_key(b, model):
    with server("--api-key", "secret", "--shutdown-grace", "0", "-c", "32768", model=model) as address:
        b.open(address + "/")
        b.wait("return /Invalid API Key/.test(document.getElementById('model').textContent)", "the refusal")
        say(b, "A")
        done(b)
        assert b.run(NOTE) == "Invalid API Key"
        setting(b, "key", "secret")
        b.wait("return document.getElementById('model').textContent === 'page'", "the model's name")
        say(b, "A")
        assert done(b) == "Hello world!"
        b.wait("return /tokens.s/.test(document.getElementById('live').textContent)", "the live line")
        say(b, "y")
        b.wait(f"return {ANSWER}.children[1].textContent.length > 20", "some of the answer")
    # the server has ended in the middle of an answer
    done(b)
    assert b.run(f"return {ANSWER}.querySelector('.note').className") == "note error" and b.run(NOTE)
    b.wait("return document.getElementById('live').textContent === 'the server does not answer'", "the live line")
    print("server gone:", b.run(NOTE))


if not shutil.which("chromedriver"):
    print("skip: no chromedriver")
    sys.exit(77)
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "page.gguf")
    write_model(path, 32768)
    with browser() as window:
        with server("--shutdown-grace", "0", "-c", "32768", model=path) as where:
            loads(window, where)
            for test in (chats, keys, escapes, stops):
                test(window)
                print(test.__name__, "ok")
            settings(window, where)
            print("settings ok")
            errors(window)
            window.size(420, 800)
            picture(window, "narrow")
            assert window.run("return document.documentElement.scrollWidth <= innerWidth"), "wider than a telephone"
            window.size(1100, 900)
            asked = window.requests()
            outside = [u for u in asked if not u.startswith((where + "/", "data:"))]
            assert len(asked) > 10 and not outside, outside
        asks_for_a_key(window, path)
        serious = [e["message"] for e in window.log("browser") if e["source"] == "javascript"]
        assert not serious, serious
