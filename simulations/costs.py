"""What the hosts of a run take for a round, by parameter: the inputs of a simulation, measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds a parameter of a fragment, unless it says otherwise, of one thread of one core.

    The defaults are of this project's own benches on one core of a server (eager mode, 4-bit
    blocks of 128): `diloco bench codec`, `overhead`, `publish`, `syncer`. An island's ranks share
    its part of the work evenly; of a syncer one thread does it all.

    Attributes:
        collect_s: Copying a fragment out of the ranks; training waits for it.
        distribute_s: Copying a version into the ranks; training waits for it.
        encode_s: Subtracting the anchor and encoding, of an island.
        stage_s: Decoding a version, adding it to the anchor, and its digest, of an island.
        plain_s: In place of encoding or decoding, where the codec is float32.
        verify_s: Verifying one contribution at the syncer.
        decode_s: Decoding and adding one contribution at the syncer.
        outer_s: Outer step.
        publish_s: Encoding a version at the syncer, and decoding it there.
        commit_s: Writing a version durably; 12 bytes a parameter at 1 GB/s.
        commit_round_s: Of one commit whatever its size, in seconds: flushes of the disk.
        call_s: Of one call whatever its size, in seconds, both ends.
        peer_call_s: The same of a call from a peer of an all-reduce, to another or the coordinator.
        carry_s: Carrying a version through both ends of a fetch: copies and checksums. No bench
            tells it from the rest, `diloco sim validate` calibrates it.
    """

    collect_s: float = 0.7e-9
    distribute_s: float = 0.7e-9
    encode_s: float = 10e-9
    stage_s: float = 8e-9
    plain_s: float = 1.3e-9
    verify_s: float = 0.5e-9
    decode_s: float = 4.9e-9
    outer_s: float = 2.3e-9
    publish_s: float = 15e-9
    commit_s: float = 12e-9
    commit_round_s: float = 5e-3
    call_s: float = 0.5e-3
    peer_call_s: float = 0.5e-3
    carry_s: float = 0.0


#: The defaults.
MEASURED = HostCosts()
#: Hosts that take no time.
FREE = HostCosts(*[0.0] * 13)
