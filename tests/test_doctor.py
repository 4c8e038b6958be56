"""`fc-eval doctor`: whether the Hub answers, asked of servers of its own."""

import contextlib
import http.server
import threading

import pytest
from huggingface_hub import constants

from fc_eval.cli import main
from fc_eval.commands import doctor
from fc_eval.compose import compose_one

LOCAL = ["model=tiny", "eval=text"]
FROM_HUB = ["model=tiny", "eval=[text,wikitext2]"]


@contextlib.contextmanager
def server(status: int):
    """An address where every request gets one status."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()


@pytest.fixture
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def hub(overrides):
    return doctor._hub(compose_one(overrides))


def test_a_hub_that_answers(online, monkeypatch):
    with server(200) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert hub(LOCAL) == f"{address} answers with HTTP 200; this run needs nothing from it"
        assert hub(FROM_HUB).endswith("this run needs wikitext2 from it")
        assert hub(["model=llama2_7b", "eval=text"]).endswith("this run needs model llama2_7b from it")
        assert hub(["model=llama2_7b", "model.path=/f", "eval=text"]).endswith("needs nothing from it")


def test_a_hub_that_does_not_answer_matters_only_where_it_is_needed(online, monkeypatch):
    with server(503) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert "answers with HTTP 503" in hub(LOCAL)
        with pytest.raises(doctor.UncertainError, match=r"HTTP 503: wikitext2 must be in its local cache, or given"):
            hub(FROM_HUB)
    monkeypatch.setattr(constants, "ENDPOINT", address)  # nobody listens there any more
    assert "does not answer within 3 s (ConnectError)" in hub(LOCAL)
    with pytest.raises(doctor.UncertainError, match="does not answer"):
        hub(FROM_HUB)


def test_offline_mode_asks_nobody(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub(LOCAL) == "offline mode is set (HF_HUB_OFFLINE); this run needs nothing from it"
    with pytest.raises(doctor.UncertainError, match="offline mode is set"):
        hub(FROM_HUB)


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--help"])
    assert caught.value.code == 0
    assert "usage: fc-eval doctor" in capsys.readouterr().out
