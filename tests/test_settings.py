"""Caches are private, movable and can be switched off."""

from __future__ import annotations

import stat

import jax
import pytest

from herald_jax import ConfigError, settings


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(settings.CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(settings.COMPILE_CACHE_VARIABLE, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def no_jax_cache(monkeypatch):
    """JAX without a compile cache of its own; what a test sets is taken back."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_where_caches_live(tmp_path, monkeypatch):
    monkeypatch.delenv(settings.CACHE_DIR_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / "herald_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.cache_dir() == tmp_path / ".cache" / "herald_jax"


def test_folders_are_private(cache):
    folder = settings.private_folder("compiled")
    assert folder == cache / "compiled"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert settings.private_folder("compiled") == folder


def test_a_folder_that_others_may_write_to_is_refused(cache):
    settings.private_folder("compiled").chmod(0o770)
    with pytest.raises(ConfigError, match="HERALD_JAX_CACHE_DIR"):
        settings.private_folder("compiled")


def test_a_folder_that_cannot_be_made_is_refused(cache):
    cache.write_text("a file")
    with pytest.raises(ConfigError, match="cannot be used"):
        settings.private_folder("compiled")


def test_compile_cache(cache, no_jax_cache, monkeypatch):
    monkeypatch.setenv(settings.COMPILE_CACHE_VARIABLE, "0")
    assert settings.enable_compile_cache() is None
    assert not cache.exists()
    monkeypatch.setenv(settings.COMPILE_CACHE_VARIABLE, "maybe")
    with pytest.raises(ConfigError, match="one of 0, 1"):
        settings.enable_compile_cache()
    monkeypatch.delenv(settings.COMPILE_CACHE_VARIABLE)
    assert settings.enable_compile_cache() == cache / "compiled"
    assert jax.config.jax_compilation_cache_dir == str(cache / "compiled")


def test_a_cache_that_jax_has_already_is_kept(cache, no_jax_cache, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    assert settings.enable_compile_cache() == tmp_path / "mine"
    assert not cache.exists()


def test_without_a_usable_folder_programs_are_compiled_anew(cache, no_jax_cache, caplog):
    cache.write_text("a file")
    assert settings.enable_compile_cache() is None
    assert "not kept" in caplog.text


def test_the_cap_of_pinned_memory_is_that_of_xla(monkeypatch):
    monkeypatch.delenv(settings.PINNED_LIMIT_VARIABLE, raising=False)
    assert settings.pinned_limit_bytes() == 64 << 30
    monkeypatch.setenv(settings.PINNED_LIMIT_VARIABLE, "100")
    assert settings.pinned_limit_bytes() == 100 << 30
    for wrong in ("", "many", "-1", "6.5", "²"):
        monkeypatch.setenv(settings.PINNED_LIMIT_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=settings.PINNED_LIMIT_VARIABLE):
            settings.pinned_limit_bytes()
