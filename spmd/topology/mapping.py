"""Who am I: one rank of a layout, read through the model view, the attention view and the expert view.

Names and signature follow TensorRT-LLM's `Mapping`. Three `Radix` values over the same ranks do all the arithmetic:

    model      pp · tp · cp                                 rank = (pp * tp_size + tp) * cp_size + cp
    attention  pp · attn_dp · attn_tp · attn_cp             attn_dp: who owns which requests
    experts    pp · moe_tp · moe_cluster · moe_ep (· cp)    cp stays the fastest axis except under HELIX, where the
                                                            experts decompose the whole tp·cp block
"""

from __future__ import annotations

from collections.abc import Mapping as Dict
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from inspect import signature
from operator import index
from typing import TYPE_CHECKING, Any

from spmd.errors import InputError
from spmd.topology.radix import Group, Groups, Radix
from spmd.topology.split import split, split_first


class CpType(StrEnum):
    """How context parallelism cuts a sequence."""

    ULYSSES = "ULYSSES"
    RING = "RING"
    HELIX = "HELIX"


VIEWS = {
    "model": ("pp", "tp", "cp"),
    "attention": ("attn_dp", "attn_tp", "attn_cp"),
    "experts": ("moe_tp", "moe_cluster", "moe_ep"),
}
AXES = tuple(axis for axes in VIEWS.values() for axis in axes)
_VIEW_OF = {axis: view for view, axes in VIEWS.items() for axis in axes}


def _quotient(whole: int, part: int, what: str) -> int:
    if whole % part:
        raise InputError(f"{what}: {part} does not divide {whole}")
    return whole // part


def _cp_items(cp_config: Dict[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """A private, hashable copy of the caller's dict, its cp_type turned into a CpType."""
    items = dict(cp_config or {})
    if "cp_type" in items:
        try:
            items["cp_type"] = CpType(str(items["cp_type"]).upper())
        except ValueError:
            names = ", ".join(CpType)
            raise InputError(f"unknown cp_type {items['cp_type']!r}: it is one of {names}, in any case") from None
    frozen = tuple(sorted((str(k), tuple(v) if isinstance(v, list) else v) for k, v in items.items()))
    try:
        hash(frozen)
    except TypeError as error:
        raise InputError(f"cp_config has a value that cannot be compared: {error}") from None
    return frozen


class Mapping:
    """One rank of a parallel layout. Immutable; equality and hash cover every field; O(1) memory at any world size.

    Sizes of -1 are derived: moe_cluster 1; moe_tp the expert world over cluster and ep, moe_ep 1; attention (tp·cp, 1)
    under ULYSSES, else (tp, cp), divided by attn_dp. `enable_attention_dp=True` means attn_dp = tp, unless
    `attn_dp_size` says otherwise. Attention sizes in the older form attn_tp·attn_cp = tp·cp together with attention DP
    are accepted.

    Every axis in (pp, tp, cp, attn_dp, attn_tp, attn_cp, moe_tp, moe_cluster, moe_ep) has `<axis>_size`, `<axis>_rank`
    (this rank's coordinate), `<axis>_group` (the ranks it meets along the axis), `<axis>_groups` (all groups, lazily).

    Errors: InputError (a ValueError), one line with the numbers, for every layout that cannot be.
    """

    if TYPE_CHECKING:
        world_size: int
        rank: int
        gpus_per_node: int
        cp_type: CpType
        _cp_items: tuple[tuple[str, Any], ...]
        pp_partition: tuple[int, ...] | None
        enable_attention_dp: bool
        enable_lm_head_tp_in_adp: bool
        dwdp_size: int
        dwdp_rank: int
        pp_size: int
        tp_size: int
        cp_size: int
        attn_dp_size: int
        attn_tp_size: int
        attn_cp_size: int
        moe_tp_size: int
        moe_cluster_size: int
        moe_ep_size: int
        pp_rank: int
        tp_rank: int
        cp_rank: int
        attn_dp_rank: int
        attn_tp_rank: int
        attn_cp_rank: int
        moe_tp_rank: int
        moe_cluster_rank: int
        moe_ep_rank: int
        pp_group: Group
        tp_group: Group
        cp_group: Group
        attn_dp_group: Group
        attn_tp_group: Group
        attn_cp_group: Group
        moe_tp_group: Group
        moe_cluster_group: Group
        moe_ep_group: Group
        pp_groups: Groups
        tp_groups: Groups
        cp_groups: Groups
        attn_dp_groups: Groups
        attn_tp_groups: Groups
        attn_cp_groups: Groups
        moe_tp_groups: Groups
        moe_cluster_groups: Groups
        moe_ep_groups: Groups

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: Dict[str, Any] | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        pp_partition: Sequence[int] | None = None,
        moe_cluster_size: int = -1,
        moe_tp_size: int = -1,
        moe_ep_size: int = -1,
        attn_tp_size: int = -1,
        attn_cp_size: int = -1,
        enable_attention_dp: bool = False,
        enable_lm_head_tp_in_adp: bool = False,
        dwdp_size: int = 0,
        dwdp_rank: int = 0,
        attn_dp_size: int = -1,
    ) -> None:
        arguments = locals()
        put = self.__dict__.__setitem__
        for name in _SIZES:
            put(name, index(arguments[name]))
        put("_cp_items", _cp_items(cp_config) if cp_config else ())
        put("cp_type", dict(self._cp_items).get("cp_type", CpType.ULYSSES))
        self._check_sizes()
        if pp_partition is not None:
            pp_partition = tuple(index(n) for n in pp_partition)
            if len(pp_partition) != pp_size or min(pp_partition) < 0:
                raise InputError(
                    f"pp_partition {list(pp_partition)} has {len(pp_partition)} counts: it needs pp_size = {pp_size}, "
                    "none below 0"
                )
        put("pp_partition", pp_partition)
        put("enable_attention_dp", bool(enable_attention_dp))
        self._resolve_experts()
        self._resolve_attention()
        if enable_lm_head_tp_in_adp and not self.enable_attention_dp:
            raise InputError(f"enable_lm_head_tp_in_adp needs attention DP, but attn_dp_size is {self.attn_dp_size}")
        put("enable_lm_head_tp_in_adp", bool(enable_lm_head_tp_in_adp))

    # ------------------------------------------------------------------ construction

    def _check_sizes(self) -> None:
        for name, derived in _SIZES.items():
            value = self.__dict__[name]
            if value < 1 and derived is not None and not (derived and value == -1):
                raise InputError(f"{name} must be at least 1{', or -1 to derive it' * derived}, but got {value}")
        world, tp, pp, cp = self.world_size, self.tp_size, self.pp_size, self.cp_size
        if tp * pp * cp != world:
            raise InputError(
                f"world_size must equal tp_size * pp_size * cp_size, but got {world} != {tp} * {pp} * {cp}"
            )
        if not 0 <= self.rank < world:
            raise InputError(f"rank must be in 0 ... {world - 1}, but got {self.rank}")
        size, rank = self.dwdp_size, self.dwdp_rank
        if size < 0 or (size > 1 and world % size):
            raise InputError(f"dwdp_size must be 0 or divide the world of {world} ranks, but got {size}")
        if rank != (self.rank % size if size > 1 else 0):
            want = f"rank % dwdp_size = {self.rank} % {size} = {self.rank % size}" if size > 1 else "0 without DWDP"
            raise InputError(f"dwdp_rank must be {want}, but got {rank}")

    def _resolve_experts(self) -> None:
        world = self.tp_size * self.cp_size if self.cp_type == CpType.HELIX else self.tp_size
        cluster, tp, ep = self.moe_cluster_size, self.moe_tp_size, self.moe_ep_size
        cluster = 1 if cluster == -1 else cluster
        if tp == -1 and ep == -1:
            ep = 1
        if tp == -1:
            tp = _quotient(world, cluster * ep, "moe_tp_size from the expert world over moe_cluster_size * moe_ep_size")
        if ep == -1:
            ep = _quotient(world, cluster * tp, "moe_ep_size from the expert world over moe_cluster_size * moe_tp_size")
        if tp * cluster * ep != world and self.dwdp_size <= 1:
            raise InputError(
                f"moe_tp_size * moe_cluster_size * moe_ep_size must equal the expert world, "
                f"but got {tp} * {cluster} * {ep} != {world} ({self.cp_type}, tp {self.tp_size}, cp {self.cp_size})"
            )
        self.__dict__.update(moe_cluster_size=cluster, moe_tp_size=tp, moe_ep_size=ep)

    def _resolve_attention(self) -> None:
        tp, cp, ulysses = self.tp_size, self.cp_size, self.cp_type == CpType.ULYSSES
        attn_dp, attn_tp, attn_cp = self.attn_dp_size, self.attn_tp_size, self.attn_cp_size
        if attn_dp == -1:
            attn_dp = tp if self.enable_attention_dp else 1
        elif attn_dp == 1 and self.enable_attention_dp:
            raise InputError(f"enable_attention_dp=True contradicts attn_dp_size=1 (tp_size {tp})")
        if tp % attn_dp:
            raise InputError(f"attn_dp_size must divide tp_size, but got {attn_dp} and {tp}")
        if ulysses and attn_cp not in (-1, 1):
            raise InputError(f"attn_cp_size must be 1 under ULYSSES, but got {attn_tp}, {attn_cp} (attn_tp, attn_cp)")
        block = tp * cp
        if attn_tp == -1 and attn_cp == -1:
            attn_cp = 1 if ulysses else cp
        if attn_tp == -1:
            attn_tp = _quotient(block, attn_dp * attn_cp, "attn_tp_size from tp * cp over attn_dp_size * attn_cp_size")
        if attn_cp == -1:
            whole = attn_dp if block % (attn_dp * attn_tp) == 0 else 1  # else the form attn_tp * attn_cp = tp * cp
            attn_cp = _quotient(block, whole * attn_tp, "attn_cp_size from tp * cp over attn_dp_size * attn_tp_size")
        if attn_tp * attn_cp == block and attn_tp % attn_dp == 0:
            attn_tp //= attn_dp
        if attn_dp * attn_tp * attn_cp != block:
            raise InputError(
                f"attn_dp_size * attn_tp_size * attn_cp_size must equal tp_size * cp_size, "
                f"but got {attn_dp} * {attn_tp} * {attn_cp} != {tp} * {cp}"
            )
        if ulysses and attn_cp != 1:
            raise InputError(f"attn_cp_size must be 1 under ULYSSES, but got {attn_tp}, {attn_cp} (attn_tp, attn_cp)")
        self.__dict__.update(attn_dp_size=attn_dp, attn_tp_size=attn_tp, attn_cp_size=attn_cp)
        self.__dict__["enable_attention_dp"] = attn_dp > 1

    # ------------------------------------------------------------------ value semantics

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Mapping is immutable: use with_rank() or a new Mapping instead of setting {name}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Mapping is immutable: {name} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        return Mapping.from_dict, (self.to_dict(),)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        return tuple(self._cp_items if name == "cp_config" else getattr(self, name) for name in FIELDS)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Mapping({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    def to_dict(self) -> dict[str, Any]:
        """Every field, resolved, as plain values that JSON can hold."""
        plain = {name: getattr(self, name) for name in FIELDS}
        plain["cp_config"] = {k: str(v) if isinstance(v, CpType) else v for k, v in self._cp_items}
        plain["pp_partition"] = self.pp_partition and list(self.pp_partition)
        return plain

    @classmethod
    def from_dict(cls, fields: Dict[str, Any]) -> Mapping:
        """The inverse of `to_dict`. InputError for a name that is no field."""
        unknown = [name for name in fields if name not in FIELDS]
        if unknown:
            raise InputError(f"unknown Mapping fields {', '.join(unknown)}: the fields are {', '.join(FIELDS)}")
        return cls(**fields)

    def with_rank(self, rank: int) -> Mapping:
        """The same layout seen by another rank."""
        dwdp_rank = rank % self.dwdp_size if self.dwdp_size > 1 else 0
        return Mapping.from_dict(self.to_dict() | {"rank": rank, "dwdp_rank": dwdp_rank})

    def repurpose_helix_cp_to_tp(self) -> Mapping:
        """The view of FFN and expert layers under HELIX: cp ranks become tp ranks; who owns which requests stays."""
        if not self.has_cp_helix():
            raise InputError(
                f"only HELIX ranks can be repurposed, but cp_type is {self.cp_type}, cp_size {self.cp_size}"
            )
        return Mapping.from_dict(
            self.to_dict()
            | {"cp_size": 1, "cp_config": None, "tp_size": self.tp_size * self.cp_size}
            | {"attn_tp_size": -1, "attn_cp_size": -1}
        )

    # ------------------------------------------------------------------ views

    @property
    def cp_config(self) -> dict[str, Any]:
        """The options of context parallelism; a fresh dict, cp_type as a CpType."""
        return dict(self._cp_items)

    @cached_property
    def model(self) -> Radix:
        return Radix({"pp": self.pp_size, "tp": self.tp_size, "cp": self.cp_size})

    @cached_property
    def attention(self) -> Radix:
        sizes = {"attn_dp": self.attn_dp_size, "attn_tp": self.attn_tp_size, "attn_cp": self.attn_cp_size}
        return Radix({"pp": self.pp_size} | sizes)

    @cached_property
    def experts(self) -> Radix:
        sizes = {"moe_tp": self.moe_tp_size, "moe_cluster": self.moe_cluster_size, "moe_ep": self.moe_ep_size}
        tail = {} if self.cp_type == CpType.HELIX else {"cp": self.cp_size}
        radix = Radix({"pp": self.pp_size} | sizes | tail)
        if radix.size != self.world_size:
            raise InputError(
                f"expert sizes {list(sizes.values())} do not number the {self.world_size} ranks (dwdp_size "
                f"{self.dwdp_size}): there are no expert groups"
            )
        return radix

    def _radix(self, axis: str) -> Radix:
        if axis not in _VIEW_OF:
            raise InputError(f"unknown axis {axis!r}: the axes are world, dwdp, {', '.join(AXES)}")
        return getattr(self, _VIEW_OF[axis])

    def group(self, axis: str, rank: int | None = None) -> Group:
        """The ranks that `rank` (default: this one) meets along `axis`, itself included, at index = its coordinate.

        Besides the nine axes: "world", and "dwdp" (consecutive ranks that share their experts' weights).
        """
        rank = self.rank if rank is None else rank
        if axis in ("world", "dwdp"):
            size = self.world_size if axis == "world" else max(self.dwdp_size, 1)
            return Radix({"outer": self.world_size // size, "inner": size}).group(rank, "inner")
        return self._radix(axis).group(rank, axis)

    def groups(self, axis: str) -> Groups:
        """All groups along an axis, as a lazy sequence."""
        return self._radix(axis).groups(axis)

    @property
    def dwdp_group(self) -> Group:
        return self.group("dwdp")

    def _neighbour(self, axis: str, step: int) -> int:
        group = self.group(axis)
        return group[(group.index(self.rank) + step) % len(group)]

    @property
    def prev_pp_rank(self) -> int:
        """Global rank of the previous stage; the first stage's is the last."""
        return self._neighbour("pp", -1)

    @property
    def next_pp_rank(self) -> int:
        return self._neighbour("pp", 1)

    @property
    def prev_cp_rank(self) -> int:
        return self._neighbour("cp", -1)

    @property
    def next_cp_rank(self) -> int:
        return self._neighbour("cp", 1)

    def is_first_pp_rank(self) -> bool:
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def is_first_cp_rank(self) -> bool:
        return self.cp_rank == 0

    def is_last_cp_rank(self) -> bool:
        return self.cp_rank == self.cp_size - 1

    def has_tp(self) -> bool:
        return self.tp_size > 1

    def has_pp(self) -> bool:
        return self.pp_size > 1

    def has_cp(self) -> bool:
        return self.cp_size > 1

    def has_cp_ulysses(self) -> bool:
        return self.has_cp() and self.cp_type == CpType.ULYSSES

    def has_cp_ring(self) -> bool:
        return self.has_cp() and self.cp_type == CpType.RING

    def has_cp_helix(self) -> bool:
        return self.has_cp() and self.cp_type == CpType.HELIX

    def has_moe_tp(self) -> bool:
        return self.moe_tp_size > 1

    def has_moe_cluster(self) -> bool:
        return self.moe_cluster_size > 1

    def has_moe_ep(self) -> bool:
        return self.moe_ep_size > 1

    @property
    def dp_size(self) -> int:
        return self.attn_dp_size

    @property
    def node_rank(self) -> int:
        """Host of this rank by gpus_per_node alone; `Distributed.local_rank` knows the real one."""
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        return self.rank % self.gpus_per_node

    def is_multi_node(self) -> bool:
        return self.world_size > self.gpus_per_node

    # ------------------------------------------------------------------ who holds what

    def pp_layers(self, num_layers: int) -> range:
        """Layers of this stage: pp_partition's count, else the first num_layers % pp stages get one more."""
        return self._stage_layers(num_layers, self.pp_rank)

    def _stage_layers(self, num_layers: int, stage: int) -> range:
        if self.pp_partition is None:
            return split_first(num_layers, self.pp_size, stage)
        if sum(self.pp_partition) != num_layers:
            counts, total = list(self.pp_partition), sum(self.pp_partition)
            raise InputError(f"pp_partition {counts} sums to {total}, but the model has {num_layers} layers")
        start = sum(self.pp_partition[:stage])
        return range(start, start + self.pp_partition[stage])

    def pp_rank_of_layer(self, layer: int, num_layers: int) -> int:
        """The stage that holds a layer."""
        for stage in range(self.pp_size):
            if layer in self._stage_layers(num_layers, stage):
                return stage
        raise InputError(f"layer {layer} is outside the {num_layers} layers 0 ... {num_layers - 1}")

    def ep_experts(self, num_experts: int) -> range:
        """Experts of this rank: the first num_experts % moe_ep ranks hold one more."""
        return split_first(num_experts, self.moe_ep_size, self.moe_ep_rank)

    def q_heads(self, num_heads: int) -> range:
        """Query heads this rank projects. InputError when there are fewer heads than shards.

        Under HELIX the heads are exchanged over cp after attention, so every cp rank needs one of its own as well.
        """
        helix = self.cp_type == CpType.HELIX
        shards = self.attn_tp_size * (self.attn_cp_size if helix else 1)
        if num_heads < shards:
            cure = "a smaller tp or cp" if self.cp_size > 1 or self.attn_cp_size > 1 else "a smaller tp"
            raise InputError(f"{num_heads} attention heads cannot be split over {shards} ranks: use {cure}")
        return split(num_heads, self.attn_tp_size, self.attn_tp_rank)

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> range:
        """Key/value heads this rank's query heads need; a head is held by every rank that needs it."""
        if num_heads % num_kv_heads:
            raise InputError(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key/value heads")
        heads, share = self.q_heads(num_heads), num_heads // num_kv_heads
        return range(heads.start // share, (heads.stop - 1) // share + 1)


# every constructor argument, in its order: the state of a Mapping is exactly this
FIELDS = tuple(signature(Mapping.__init__).parameters)[1:]

# the integers among them, and whether -1 means "derive it" (None: checked elsewhere)
_SIZES = {
    name: None if "rank" in name or name == "dwdp_size" else name.startswith(("moe", "attn"))
    for name in FIELDS
    if name.endswith(("_size", "rank", "_per_node"))
}


def _add_axis(axis: str) -> None:
    setattr(Mapping, f"{axis}_rank", property(lambda self: self._radix(axis).coordinate(self.rank, axis)))
    setattr(Mapping, f"{axis}_group", property(lambda self: self.group(axis)))
    setattr(Mapping, f"{axis}_groups", property(lambda self: self.groups(axis)))


for _axis in AXES:
    _add_axis(_axis)
