"""The official openai package against the server: chat, streams, tools, log-probabilities, errors."""
import asyncio
import json
import os
import ssl
import sys
import threading
import time
import urllib.request

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
import openai
from serving import server

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "x",
          "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]


def user(text):
    return [{"role": "user", "content": text}]


def raises(kind, call, **more):
    try:
        call()
    except kind as e:
        for key, value in more.items():
            assert getattr(e, key) == value, (key, getattr(e, key), value)
        return
    raise AssertionError(f"no {kind.__name__}")


def chat(c):
    r = c.chat.completions.create(model="any", messages=user("A"), temperature=0)
    assert r.choices[0].message.content == "Hello world!", r
    assert r.choices[0].finish_reason == "stop" and r.model == "script"
    assert r.usage.completion_tokens == 4 and r.usage.prompt_tokens_details.cached_tokens == 0
    r = c.chat.completions.create(model="any", messages=user("A"), n=2, seed=1, max_tokens=1,
                                  logprobs=True, top_logprobs=3)
    assert len(r.choices) == 2 and r.choices[1].finish_reason == "length"
    lp = r.choices[0].logprobs.content[0]
    assert lp.token == "Hello " and bytes(lp.bytes) == b"Hello " and len(lp.top_logprobs) == 3


def stream(c):
    s = c.chat.completions.create(model="any", messages=user("A"), stream=True,
                                  stream_options={"include_usage": True})
    chunks = list(s)
    text = "".join(k.choices[0].delta.content or "" for k in chunks if k.choices)
    assert text == "Hello world!" and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 4 and not chunks[-1].choices
    assert all(k.usage is None for k in chunks[:-1]) and len({k.id for k in chunks}) == 1
    s = c.completions.create(model="any", prompt="A", stream=True, stop=["ld"])
    assert "".join(k.choices[0].text for k in s) == "Hello wor"
    s = c.chat.completions.create(model="any", messages=user("y"), stream=True)
    next(iter(s))
    s.close()


def tools(c):
    r = c.chat.completions.create(model="any", messages=user("T"), tools=TOOLS)
    m = r.choices[0].message
    assert r.choices[0].finish_reason == "tool_calls" and m.content == "I look."
    assert m.tool_calls[0].function.name == "get_weather"
    assert m.tool_calls[0].function.arguments == '{"city":"Paris"}'
    # the turn goes back as it came
    again = user("T") + [m.model_dump(exclude_none=True)] + [
        {"role": "tool", "tool_call_id": m.tool_calls[0].id, "content": "sunny"}] + user("A")
    r = c.chat.completions.create(model="any", messages=again, tools=TOOLS)
    assert r.choices[0].message.content == "Hello world!"
    name = arguments = ""
    for k in c.chat.completions.create(model="any", messages=user("T"), tools=TOOLS, stream=True):
        for t in k.choices[0].delta.tool_calls or []:
            name += t.function.name or ""
            arguments += t.function.arguments or ""
    assert (name, arguments) == ("get_weather", '{"city":"Paris"}')


def helpers(c):
    """The package's own reading of streams, raw answers, and thirty requests at once."""
    with c.chat.completions.stream(model="any", messages=user("A"), logprobs=True, top_logprobs=2) as s:
        assert {"content.delta", "content.done", "logprobs.content.done"} <= {e.type for e in s}
        choice = s.get_final_completion().choices[0]
    assert choice.message.content == "Hello world!"
    assert [t.token for t in choice.logprobs.content] == ["Hello ", "wor", "ld!"], choice.logprobs
    with c.chat.completions.stream(model="any", messages=user("T"), tools=TOOLS,
                                   stream_options={"include_usage": True}) as s:
        assert "tool_calls.function.arguments.done" in {e.type for e in s}
        whole = s.get_final_completion()
    assert whole.choices[0].message.tool_calls[0].function.arguments == '{"city":"Paris"}'
    assert whole.usage.completion_tokens == 5
    raw = c.chat.completions.with_raw_response.create(model="any", messages=user("A"))
    assert raw.headers["x-request-id"].startswith("req_") and raw.parse().choices

    async def many():
        a = openai.AsyncOpenAI(base_url=str(c.base_url), api_key=c.api_key, max_retries=0)
        answers = [a.chat.completions.create(model="any", messages=user("A")) for _ in range(30)]
        assert {r.choices[0].message.content for r in await asyncio.gather(*answers)} == {"Hello world!"}

    asyncio.run(many())


def completions(c):
    r = c.completions.create(model="any", prompt=["A", [98, 65]], max_tokens=1, logprobs=1, echo=True)
    assert [k.text for k in r.choices] == ["AHello ", "bAHello "]
    lp = r.choices[1].logprobs
    assert lp.tokens == ["b", "A", "Hello "] and lp.token_logprobs[0] is None
    assert lp.text_offset == [0, 1, 2] and len(lp.top_logprobs) == 3
    assert [m.id for m in c.models.list()] == ["script"]
    assert c.models.retrieve("script").owned_by


def errors(c):
    create = c.chat.completions.create
    raises(openai.BadRequestError, lambda: create(model="any", messages=[]), param="messages")
    raises(openai.BadRequestError, lambda: create(model="any", messages=user("A" * 4000)),
           code="context_length_exceeded")
    raises(openai.BadRequestError, lambda: create(model="any", messages=user("A"),
           response_format={"type": "json_object"}), param="response_format")
    raises(openai.BadRequestError, lambda: create(model="any", messages=user("A"), tools=TOOLS,
           tool_choice="required"), param="tool_choice")
    raises(openai.NotFoundError, lambda: c.models.retrieve("other"), code="model_not_found")
    other = openai.OpenAI(base_url=str(c.base_url), api_key="wrong", max_retries=0)
    raises(openai.AuthenticationError, lambda: other.models.list())


def late_error():
    """An error in the middle of a stream is an APIError, not a JSON error."""
    with server("--timeout", "1", "--n-parallel", "1", "-c", "32768", max_ctx=32768) as address:
        c = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        # the second one waits for the first until its time is over
        first = c.completions.create(model="any", prompt="x", stream=True, max_tokens=32000)
        next(iter(first))
        failed = 0
        for _ in range(3):
            try:
                for _ in c.completions.create(model="any", prompt="x", stream=True, max_tokens=32000):
                    pass
            except openai.APIError as e:
                assert "time limit" in str(e), e
                failed += 1
        first.close()
        print("late errors seen:", failed)
        assert failed == 3


def pings():
    """Comments while a stream waits are nothing to the client."""
    with server("--sse-ping-interval", "1", "--n-parallel", "1", "-c", "32768", max_ctx=32768) as address:
        c = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0)
        first = c.completions.create(model="any", prompt="x", stream=True, max_tokens=32000)
        next(iter(first))
        threading.Timer(2.5, first.close).start()
        begin = time.monotonic()
        chunks = list(c.completions.create(model="any", prompt="A", stream=True))
        assert "".join(k.choices[0].text for k in chunks) == "Hello world!"
        print("waited", round(time.monotonic() - begin, 1), "s")


def tls():
    """HTTPS: answers, streams, a client that leaves; and no answer without TLS."""
    pem = os.path.join(os.path.dirname(__file__), "support", "localhost.pem")  # self-signed, its key too
    with server("--ssl-key-file", pem, "--ssl-cert-file", pem) as address:
        assert address.startswith("https://127.0.0.1:"), address
        trust = ssl.create_default_context(cafile=pem)
        c = openai.OpenAI(base_url=address + "/v1", api_key="x", max_retries=0,
                          http_client=openai.DefaultHttpxClient(verify=trust))
        chat(c)
        stream(c)
        for _ in range(3):
            endless = c.completions.create(model="any", prompt="x", stream=True, max_tokens=2000)
            next(iter(endless))
            endless.close()
        for _ in range(200):
            with urllib.request.urlopen(address + "/v1/stats", context=trust) as r:
                counts = json.load(r)
            if counts["running"] == 0:
                break
            time.sleep(0.02)
        assert counts["running"] == 0 and counts["cancelled"] >= 3, counts
        raises(openai.APIConnectionError, lambda: openai.OpenAI(
            base_url=address + "/v1", api_key="x", max_retries=0).models.list())  # not trusted
        raises(OSError, lambda: urllib.request.urlopen(address.replace("https", "http") + "/health"))


with server("--api-key", "secret") as where:
    client = openai.OpenAI(base_url=where + "/v1", api_key="secret", max_retries=0, timeout=60)
    for test in (chat, stream, tools, helpers, completions, errors):
        test(client)
        print(test.__name__, "ok")
late_error()
pings()
tls()
print("tls ok")
