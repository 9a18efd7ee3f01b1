"""What the hosts of a run take for a round, by parameter: the inputs of a simulation, measured.

Codecs run on CPUs, those of islands with accelerators, too: a fragment is collected into memory of
the host, and all that follows happens there. Lanes of `COMPILE_NUMEL` values and more are coded by
compiled formulas, smaller ones eagerly (`diloco.compression.compiled`); so are costs. CPU time of
one core of an AMD EPYC that copies 24 GB/s (`diloco bench codec`), with a C++ compiler, in int4:

    ns a value       compiled  eager
    collect             0.31    0.54   bench overhead: collect
    distribute          0.35    0.64   bench overhead: distribute
    encode               1.5     4.3   bench overhead: pseudo-gradient, norm, encode
    stage                2.1     3.3   bench overhead: decode and add, digest of lanes
    plain                1.1     1.1   bench overhead in float32: encode 0.9, stage 1.4
    carry                1.6     1.6   bench overhead: rest of the other threads, less its bytes
    decode               1.6     4.3   bench syncer: tensors, an island
    outer step           0.8     3.2   `bench syncer --rows publish`: outer step
    publish              3.1     5.5   the same: downlink and a decode; 0.6 of a digest
    commit                12      12   bench syncer: tensors, less all of the above
    verify               0.2     0.2   bench syncer: Python and gRPC, an island, less its bytes

`overhead` with one fragment (lanes of 620,000 values) and eight (78,000); the command itself has
four (155,000), whose encoding takes 2.6 and staging 2.6. `syncer` with 2 and 8 islands, whose
difference is that of an island, and 16.8M parameters (lanes of 1M) and 2.0M (123,000); `publish`
with 25M (1.6M) and 1.9M (119,000). float32 next to int4 tells bytes from values: 0.6 ns a byte at
an island each way, 1.2 at a syncer. Lanes of several sizes tell what each takes whatever its size:
0.38 ms at the syncer, 0.36 ms at its island, half of them on the way up. A commit of 200,000
parameters takes 11 ms (`publish`: commit), next to all of them flushes of the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from diloco.compression.compiled import COMPILE_NUMEL


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Seconds a parameter of a fragment, unless it says otherwise, of one thread of one core.

    An island's ranks share its part of the work evenly; of a syncer one thread does it all.

    Attributes:
        collect_s: Copying a fragment out of the ranks; training waits for it.
        distribute_s: Copying a version into the ranks; training waits for it.
        encode_s: Subtracting the anchor and encoding, of an island.
        stage_s: Decoding a version, adding it to the anchor, and its digest, of an island.
        plain_s: In place of encoding or decoding, where the codec is float32.
        verify_s: Receiving and verifying one contribution at the syncer.
        decode_s: Decoding and adding one contribution at the syncer.
        outer_s: Outer step.
        publish_s: Encoding a version at the syncer, and decoding it there.
        commit_s: Writing a version durably, 12 bytes a parameter and what it was made from.
        commit_round_s: Of one commit whatever its size, in seconds: flushes of the disk.
        call_s: Of one call whatever its size, in seconds, both ends.
        lane_s: Of each lane of a contribution, in seconds, both ends: a call of its own.
        carry_s: Carrying a version through both ends of a fetch.
        byte_s: Carrying one byte, either way, in seconds, both ends: copies and checksums. Together
            with what is carried by parameter; a transfer that takes longer hides all but its end.
        eager: Of lanes that are too small to be coded by compiled formulas; None: the same.
    """

    collect_s: float
    distribute_s: float
    encode_s: float
    stage_s: float
    plain_s: float
    verify_s: float
    decode_s: float
    outer_s: float
    publish_s: float
    commit_s: float
    commit_round_s: float
    call_s: float
    lane_s: float
    carry_s: float
    byte_s: float
    eager: HostCosts | None = None

    def of(self, numel: float, num_lanes: int) -> HostCosts:
        """Give those of a fragment, by the size of its lanes, which are as good as equal."""
        is_small = numel / num_lanes < COMPILE_NUMEL
        return self.eager if is_small and self.eager is not None else self

    def scaled(self, factor: float) -> HostCosts:
        """Return them with everything so many times as long."""
        names = [field.name for field in fields(self) if field.name != "eager"]
        eager = None if self.eager is None else self.eager.scaled(factor)
        return HostCosts(**{name: factor * getattr(self, name) for name in names}, eager=eager)


#: What benches measured where lanes are small.
EAGER = HostCosts(
    collect_s=0.54e-9,
    distribute_s=0.64e-9,
    encode_s=4.3e-9,
    stage_s=3.3e-9,
    plain_s=1.1e-9,
    verify_s=0.2e-9,
    decode_s=4.3e-9,
    outer_s=3.2e-9,
    publish_s=5.5e-9,
    commit_s=12e-9,
    commit_round_s=11e-3,
    call_s=0.5e-3,
    lane_s=0.55e-3,
    carry_s=1.6e-9,
    byte_s=1.8e-9,
)
#: What they measured where lanes are large; of small ones it is the other.
MEASURED = replace(
    EAGER,
    collect_s=0.31e-9,
    distribute_s=0.35e-9,
    encode_s=1.5e-9,
    stage_s=2.1e-9,
    decode_s=1.6e-9,
    outer_s=0.8e-9,
    publish_s=3.1e-9,
    eager=EAGER,
)
#: Hosts that take no time.
FREE = EAGER.scaled(0.0)
