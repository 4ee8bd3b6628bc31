"""A scheme whose workers are nodes."""

from __future__ import annotations

from mpisparse.comm.hierarchy import Nodes
from mpisparse.core.records import Parts
from mpisparse.errors import ConfigurationError
from mpisparse.schemes.companion import Scheme, Site
from mpisparse.schemes.options import Options


def build_by_node(options: Options, parts: Parts, site: Site, nodes: Nodes) -> Scheme:
    """Build a scheme that sums inside each node first; `parts` are those of all ranks."""
    if parts.backend.name == "cuda":
        raise ConfigurationError('hierarchy="node" sums in the memory of the host, and the model is on a CUDA device')
    return options.build_by_node(parts, site, nodes)
