"""URLs in the package's metadata: of the repository that it is built from, wherever that lies."""

from __future__ import annotations

import re
import subprocess
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# What git clones over the net, as a page: "https://host/owner/name", "git@host:owner/name.git".
_REMOTE = re.compile(
    r"(?:https://(?:[^@/]+@)?|ssh://git@|git@)([\w.-]+)[:/]([\w./-]+?)(?:\.git)?/?"
)


def project_urls(remote: str) -> dict[str, str]:
    """The pages of a repository that people look for; none of one that has no pages.

    Args:
        remote: as ``git remote get-url`` says it.
    """
    found = _REMOTE.fullmatch(remote)
    if found is None:
        return {}
    home = f"https://{found[1]}/{found[2]}"
    return {"Homepage": home, "Repository": home, "Issues": f"{home}/issues"}


class Urls(MetadataHookInterface):
    """Adds the URLs while the package is built; a tree without git has none."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``urls``."""
        git = ["git", "-C", self.root, "remote", "get-url", "origin"]
        try:
            done = subprocess.run(git, capture_output=True, text=True, check=False)
        except OSError:  # there is no git
            metadata["urls"] = {}
            return
        metadata["urls"] = project_urls(done.stdout.strip())
