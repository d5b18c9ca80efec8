"""Renamed keys and values: old names still work, with a note."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

KEYS = {
    "optim.schedule.final_ratio": "optim.schedule.min_lr_ratio",
    "cluster.rank": "cluster.node_rank",
    "cluster.head": "cluster.rdzv_endpoint",
}
VALUES = {("train.activation_checkpointing", "blocks"): "full"}


def renamed(key: str, value: Any, notices: list[str]) -> tuple[str, Any]:
    """Return a key and its value under their current names."""
    section = OmegaConf.create({})
    if isinstance(value, dict) and any(old.startswith(f"{key}.") for old in KEYS):
        OmegaConf.update(section, key, value)
        use_new_names(section, notices)
        return key, OmegaConf.to_container(OmegaConf.select(section, key))
    if key in KEYS:
        notices.append(f"{key} is {KEYS[key]} now, and was taken for it")
        key = KEYS[key]
    if isinstance(value, str) and (key, value) in VALUES:
        notices.append(f"{key}={value} is {key}={VALUES[key, value]} now, and was taken for it")
        value = VALUES[key, value]
    return key, value


def use_new_names(config: DictConfig, notices: list[str]) -> None:
    """Replace every renamed key and value in the settings of one file or argument."""
    for old in (*KEYS, *(key for key, _ in VALUES)):
        parent, _, name = old.rpartition(".")
        holder = OmegaConf.select(config, parent, throw_on_missing=False)
        if not isinstance(holder, DictConfig) or name not in holder:
            continue
        if OmegaConf.is_missing(holder, name) or OmegaConf.is_interpolation(holder, name):
            continue
        value = holder[name]
        if isinstance(value, list | dict | DictConfig):
            continue
        key, new = renamed(old, value, notices)
        if (key, new) != (old, value):
            del holder[name]
            OmegaConf.update(config, key, new, force_add=True)


def move_profile(config: DictConfig, notices: list[str]) -> None:
    """Move `cluster.profile`, as older files have it, to `hardware`."""
    cluster = config.get("cluster")
    if not isinstance(cluster, DictConfig) or "profile" not in cluster:
        return
    profile = cluster.pop("profile")
    if isinstance(profile, DictConfig) and profile.get("name") is not None:
        config["hardware"].merge_with(profile)
        notices.append("cluster.profile is hardware now, and was taken for it")
