"""Editions: what keeps compiled code of another Paceline from being found in torch's caches."""

from __future__ import annotations

from importlib import metadata

from paceline import edition as module
from paceline.edition import edition


def test_another_text_is_another_edition(monkeypatch):
    before = edition("early.py")
    assert edition("early.py") == before
    monkeypatch.setattr(module.pkgutil, "get_data", lambda _package, _name: b"another text")
    assert edition("early.py") != before


def test_without_sources_the_version_counts(monkeypatch):
    def nothing(_package, _name):
        raise OSError

    monkeypatch.setattr(module.pkgutil, "get_data", nothing)
    before = edition("early.py")
    monkeypatch.setattr(metadata, "version", lambda _package: "99.0")
    assert edition("early.py") != before
