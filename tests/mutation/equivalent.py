"""Mutants that no test can notice, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "simulator/machine/compute.py",
        "input_dtype = block.tensor[operator.inputs[0]].dtype",
        "input_dtype = block.tensor[operator.inputs[(-1)]].dtype",
    ): "both operands of a product have one dtype",
    (
        "strategies/explanation/sensitivity.py",
        "if lost_outcome.stays or abs(log(edge)) <= EDGE_TOLERANCE:",
        "if lost_outcome.stays or (abs(log(edge)) < EDGE_TOLERANCE):",
    ): "an edge is found to the same fraction either way, and bisection never ends just there",
    (
        "strategies/search/speed_division.py",
        "[np.concatenate(row) for row in zip(*(np.split(group, pipeline) for group in groups), strict=True)]",
        "[np.concatenate(row) for row in zip(*(np.split(group, pipeline) for group in groups), strict=(False))]",
    ): "every group is split into as many parts as there are stages",
    (
        "strategies/bounds/step_time.py",
        'if plan.schedule == "naive" and sends is not None:  # one microbatch after another, there and back',
        "if (plan.schedule == 'naive'):  # one microbatch after another, there and back",
    ): "stages of naive adjoin, so that there are sends; the rest is for the checker of types",
    (
        "strategies/bounds/step_time.py",
        "return tuple(map(sum, zip(*(columns[name] for name in names), strict=True)))",
        "return tuple(map(sum, zip(*(columns[name] for name in names), strict=(False))))",
    ): "all columns have an entry a position",
    (
        "strategies/lowering/rank_classes/placement.py",
        "return parts[0] if len(parts) == 1 else np.concatenate(parts)",
        "return parts[0] if len(parts) == (0) else np.concatenate(parts)",
    ): "one part concatenated is that part, copied",
    (
        "strategies/operators/pass_costs.py",
        "for axis, elements in zip(OPERATOR_AXES, parts, strict=True):",
        "for axis, elements in zip(OPERATOR_AXES, parts, strict=(False)):",
    ): "there is one part an axis",
    (
        "strategies/operators/pass_costs.py",
        "norm = machine.communicator(NORM, 0).ticks(*NORM_SUM) if NORM in machine.table.tables else 0",
        "norm = machine.communicator(NORM, (-1)).ticks(*NORM_SUM) if NORM in machine.table.tables else 0",
    ): "all ranks of a mesh of operator axes are one group",
    (
        "strategies/explanation/sensitivity.py",
        "for first_outcome, far_factor in zip(outcomes, (1 / REGION_FACTOR, REGION_FACTOR), strict=True)",
        "for first_outcome, far_factor in zip(outcomes, (1 / REGION_FACTOR, REGION_FACTOR), strict=(False))",
    ): "there are two of both",
    (
        "strategies/explanation/sensitivity.py",
        "while abs(losing_log - winning_log) > EDGE_TOLERANCE:",
        "while (abs(losing_log - winning_log) >= EDGE_TOLERANCE):",
    ): "halving the logarithm of a factor never comes to just that",
    (
        "strategies/lowering/costs/liveness.py",
        'return f"{memory_name} in fp8", size * ITEMSIZE["fp8"] // ITEMSIZE[self.block.tensor[name].dtype]',
        "return f\"{memory_name} in fp8\", (size / ITEMSIZE['fp8']) // ITEMSIZE[self.block.tensor[name].dtype]",
    ): "an element in fp8 is one byte",
    (
        "strategies/lowering/costs/liveness.py",
        'return f"{memory_name} in fp8", size * ITEMSIZE["fp8"] // ITEMSIZE[self.block.tensor[name].dtype]',
        'return f"{memory_name} in fp8", size // ITEMSIZE[self.block.tensor[name].dtype]',
    ): "an element in fp8 is one byte",
    (
        "strategies/lowering/costs/liveness.py",
        "if source is None or source.cuts == target.cuts:",
        "if (source is None):",
    ): "no exchange leaves cuts as they are",
    (
        "strategies/lowering/costs/liveness.py",
        "if operator.kind in PRODUCTS and operator.outputs[0] in self._loss_inputs:",
        "if operator.kind in PRODUCTS and operator.outputs[(-1)] in self._loss_inputs:",
    ): "what makes logits makes nothing else",
    (
        "strategies/lowering/costs/liveness.py",
        "itemsizes[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]",
        "itemsizes[operator.outputs[(-1)]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]",
    ): "what makes logits makes nothing else",
    (
        "strategies/lowering/costs/liveness.py",
        "itemsizes[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]",
        "itemsizes[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[(-1)]].dtype]",
    ): "both operands of a product have one dtype",
    (
        "strategies/lowering/costs/liveness.py",
        "producers = dict.fromkeys(self.block.inputs, 0)",
        "producers = dict.fromkeys(self.block.inputs, (-1))",
    ): "no operator is before the first",
    (
        "strategies/lowering/costs/liveness.py",
        "last_operators = dict.fromkeys((owners[name] for name in self.block.inputs if name in owners), 0)",
        "last_operators = dict.fromkeys((owners[name] for name in self.block.inputs if name in owners), (-1))",
    ): "no operator is before the first",
    (
        "strategies/lowering/costs/liveness.py",
        "sizes[name] = max(sizes.get(name, 0), self.shard_size(operator, name))",
        "sizes[name] = max(sizes.get(name, (1)), self.shard_size(operator, name))",
    ): "a tensor has at least one byte",
    (
        "strategies/lowering/costs/liveness.py",
        "sizes[name] = max(sizes.get(name, 0), self.shard_size(operator, name))",
        "sizes[name] = max(sizes.get(name, (-1)), self.shard_size(operator, name))",
    ): "a tensor has at least one byte",
    (
        "strategies/lowering/costs/liveness.py",
        "term_owner, sum_owner = owners[name], owners[operator.outputs[0]]",
        "term_owner, sum_owner = owners[name], owners[operator.outputs[(-1)]]",
    ): "a sum has one result",
    (
        "strategies/lowering/costs/liveness.py",
        "return operator.outputs[0] in self._logit_itemsizes",
        "return operator.outputs[(-1)] in self._logit_itemsizes",
    ): "what makes logits makes nothing else",
    (
        "simulator/collectives/choose.py",
        "if seconds < best_seconds * (1 - 1e-12):",
        "if seconds < (best_seconds / (1 - 1e-12)):",
    ): "two algorithms that differ by rounding alone are both fastest",
    (
        "simulator/collectives/choose.py",
        "if seconds < best_seconds * (1 - 1e-12):",
        "if seconds < best_seconds * ((1 + 1e-12)):",
    ): "two algorithms that differ by rounding alone are both fastest",
    (
        "simulator/collectives/choose.py",
        "if seconds < best_seconds * (1 - 1e-12):",
        "if seconds < best_seconds * (1 - (2e-12)):",
    ): "two algorithms that differ by rounding alone are both fastest",
    (
        "simulator/collectives/choose.py",
        "if len(choices) == 1:",
        "if len(choices) == (0):",
    ): "a single algorithm is picked whatever it takes; its phases are only not computed",
    (
        "simulator/collectives/traffic.py",
        "_SPARSE_RATIO = 4",
        "_SPARSE_RATIO = (3)",
    ): "both ways of adding rows up give the same",
    (
        "simulator/collectives/traffic.py",
        "if num_groups * num_links <= _SPARSE_RATIO * len(key):",
        "if (num_groups * num_links < _SPARSE_RATIO * len(key)):",
    ): "both ways of adding rows up give the same",
    (
        "simulator/collectives/traffic.py",
        "if num_groups * num_links <= _SPARSE_RATIO * len(key):",
        "if num_groups <= _SPARSE_RATIO * len(key):",
    ): "both ways of adding rows up give the same",
    (
        "simulator/collectives/traffic.py",
        "if len(parts) == 1:",
        "if len(parts) == (0):",
    ): "rows that are added up already are what they were",
    (
        "simulator/collectives/traffic.py",
        "first_rows = np.flatnonzero(np.diff(pair, prepend=-1))",
        "first_rows = np.flatnonzero(np.diff(pair, prepend=(1)))",
    ): "the first pair is number 0, and the order of rows changes no sum",
    (
        "simulator/collectives/traffic.py",
        "hop = np.arange(len(pair)) - np.repeat(first_rows, np.diff(first_rows, append=len(pair)))",
        "hop = np.arange(len(pair))",
    ): "the order of rows changes no sum",
    (
        "simulator/collectives/traffic.py",
        "group, link, load = (np.concatenate(column) for column in zip(empty, *parts, strict=True))",
        "group, link, load = (np.concatenate(column) for column in zip(empty, *parts, strict=(False)))",
    ): "all parts have three columns",
    (
        "simulator/collectives/traffic.py",
        "latency = np.zeros(len(phases[0].latency))",
        "latency = np.zeros(len(phases[(-1)].latency))",
    ): "all phases are of the same groups",
    (
        "simulator/collectives/traffic.py",
        "np.max([part.max_latency for part in parts], axis=0),",
        "np.max([part.max_latency for part in parts], axis=(1)),",
    ): "nothing asks for the longest of several traffics",
    (
        "simulator/collectives/point_to_point.py",
        "_PAIRS = 1 << 18",
        "_PAIRS = 1 << (17)",
    ): "how many messages are held at once changes no sum",
    (
        "simulator/collectives/point_to_point.py",
        "_PAIRS = 1 << 18",
        "_PAIRS = (0) << 18",
    ): "how many messages are held at once changes no sum",
    (
        "simulator/collectives/in_switch.py",
        "load = link_traffic.load * np.where(sends[link_traffic.link], out_load, in_load) / cluster.library.reduction",
        "load = np.where(sends[link_traffic.link], out_load, in_load) / cluster.library.reduction",
    ): "in a ring behind a switch every port carries one byte each way",
    (
        "simulator/collectives/in_switch.py",
        "part = placement if len(members) == len(groups) else place_groups(cluster, sorted_groups[members])",
        "part = place_groups(cluster, sorted_groups[members])",
    ): "all groups placed again are placed as before",
    (
        "simulator/collectives/torus.py",
        "boxes = np.sort(groups[members], axis=1).reshape(-1, *shape[shape > 1])",
        "boxes = np.sort(groups[members], axis=1).reshape(-(2), *shape[shape > 1])",
    ): "numpy takes any negative length for the one that is left",
    (
        "strategies/bounds/group_bounds.py",
        'plan = complete(self.problem, replace(family, schedule="gpipe", stages="balanced", zero=2))',
        'plan = complete(self.problem, replace(family, schedule="gpipe", stages="balanced", zero=(3)))',
    ): "gradients leave whole with ZeRO 3 as with ZeRO 2",
    (
        "strategies/bounds/group_bounds.py",
        "rank, (passes, stages, _) = self.costs.machine(plan).rank(0), self.costs.find_keys(plan)",
        "rank, (passes, stages, _) = self.costs.machine(plan).rank((-1)), self.costs.find_keys(plan)",
    ): "devices are alike where this is asked",
    (
        "strategies/bounds/group_bounds.py",
        "return sum(ticks[name] * n for name, n in runs), min(layers, default=0)",
        "return sum(ticks[name] * n for name, n in runs), min(layers, default=(1))",
    ): "a network without layers has none on any rank",
    (
        "strategies/bounds/group_bounds.py",
        "return sum(ticks[name] * n for name, n in runs), min(layers, default=0)",
        "return sum(ticks[name] * n for name, n in runs), min(layers, default=(-1))",
    ): "a network without layers has none on any rank",
    (
        "strategies/bounds/group_bounds.py",
        "plan = _with_states(plan, states[0])",
        "plan = _with_states(plan, states[(-1)])",
    ): "passes cost and keep the same under all states of a class",
    (
        "strategies/bounds/group_bounds.py",
        "if limit < inf and self._bound_times(plan, machine, quickest_choices, tails).min() >= limit:",
        "if (self._bound_times(plan, machine, quickest_choices, tails).min() >= limit):",
    ): "no time is infinite",
    (
        "strategies/bounds/group_bounds.py",
        "if limit < inf and self._bound_times(plan, machine, quickest_choices, tails).min() >= limit:",
        "if (limit <= inf) and self._bound_times(plan, machine, quickest_choices, tails).min() >= limit:",
    ): "no time is infinite",
    (
        "strategies/bounds/group_bounds.py",
        "if limit < inf and self._bound_times(plan, machine, quickest_choices, tails).min() >= limit:",
        "if limit < inf and (self._bound_times(plan, machine, quickest_choices, tails).min() > limit):",
    ): "what takes as long as the limit is left out of the table anyway",
    (
        "strategies/bounds/group_bounds.py",
        "hopeful_rows = np.flatnonzero(times.min(axis=1) < limit)",
        "hopeful_rows = np.flatnonzero((times.min(axis=1) <= limit))",
    ): "what takes as long as the limit is left out of the table anyway",
    (
        "strategies/bounds/group_bounds.py",
        "for table, column in zip(tables, zip(*rows, strict=True), strict=True):",
        "for table, column in zip(tables, zip(*rows, strict=(False)), strict=True):",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "for table, column in zip(tables, zip(*rows, strict=True), strict=True):",
        "for table, column in zip(tables, zip(*rows, strict=True), strict=(False)):",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "return _number_distinct(zip(stages.kinds.kind_of, boundaries, stages.positions, strict=True))",
        "return _number_distinct(zip(stages.kinds.kind_of, boundaries, stages.positions, strict=(False)))",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "edges = sorted({0, count, *(min(max(edge, 0), count) for edge in (num_first, num_offloaded))})",
        "edges = sorted({0, count, *(min(max(edge, (1)), count) for edge in (num_first, num_offloaded))})",
    ): "an edge only says where to look anew",
    (
        "strategies/bounds/group_bounds.py",
        "work = sum(work_ticks * count for work_ticks, (_, count) in zip(works, runs, strict=True))",
        "work = sum(work_ticks * count for work_ticks, (_, count) in zip(works, runs, strict=(False)))",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "sums = [(0, 0)]",
        "sums = [((1), 0)]",
    ): "only differences of sums are read",
    (
        "strategies/bounds/group_bounds.py",
        "sums = [(0, 0)]",
        "sums = [((-1), 0)]",
    ): "only differences of sums are read",
    (
        "strategies/bounds/group_bounds.py",
        "sums = [(0, 0)]",
        "sums = [(0, (1))]",
    ): "only differences of sums are read",
    (
        "strategies/bounds/group_bounds.py",
        "sums = [(0, 0)]",
        "sums = [(0, (-1))]",
    ): "only differences of sums are read",
    (
        "strategies/bounds/group_bounds.py",
        "for (block, count), work_ticks, layer in zip(runs, works, layers, strict=True):",
        "for (block, count), work_ticks, layer in zip(runs, works, layers, strict=(False)):",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "for _ in range(count if layer else 0):",
        "for _ in range(count if layer else (-1)):",
    ): "a range up to a negative number is empty",
    (
        "strategies/bounds/group_bounds.py",
        "return (forward, 0, 0, 0) if in_passes else (forward, memory.backward, memory.inputs, memory.weights)",
        "return (forward, (-1), 0, 0) if in_passes else (forward, memory.backward, memory.inputs, memory.weights)",
    ): "the forward before it holds no less",
    (
        "strategies/bounds/group_bounds.py",
        "return (forward, 0, 0, 0) if in_passes else (forward, memory.backward, memory.inputs, memory.weights)",
        "return (forward, 0, (-1), 0) if in_passes else (forward, memory.backward, memory.inputs, memory.weights)",
    ): "the forward before it holds no less",
    (
        "strategies/bounds/group_bounds.py",
        "return (forward, 0, 0, 0) if in_passes else (forward, memory.backward, memory.inputs, memory.weights)",
        "return (forward, 0, 0, (-1)) if in_passes else (forward, memory.backward, memory.inputs, memory.weights)",
    ): "the forward before it holds no less",
    (
        "strategies/bounds/group_bounds.py",
        "rows = list_actions(name, ranks, few_microbatches if exists else microbatches, chunks)",
        "rows = list_actions(name, ranks, microbatches, chunks)",
    ): "more microbatches only take longer to look at",
    (
        "strategies/bounds/group_bounds.py",
        "MICROBATCHES_PER_RANK = 4",
        "MICROBATCHES_PER_RANK = (5)",
    ): "three microbatches a rank already fill every schedule",
    (
        "strategies/bounds/group_bounds.py",
        "MICROBATCHES_PER_RANK = 4",
        "MICROBATCHES_PER_RANK = (3)",
    ): "three microbatches a rank already fill every schedule",
    (
        "strategies/bounds/group_bounds.py",
        "MICROBATCHES_PER_RANK = 4",
        "MICROBATCHES_PER_RANK = (8)",
    ): "three microbatches a rank already fill every schedule",
    (
        "strategies/bounds/step_time.py",
        "(0,) * plan.pipeline if any(plan.offload.optimizer) else optimizer",
        "(0,) * plan.pipeline if all(plan.offload.optimizer) else optimizer",
    ): "without a flush hosts make whole updates",
    (
        "strategies/bounds/step_time.py",
        "return _PositionLoads(*zip(*rows, strict=True))",
        "return _PositionLoads(*zip(*rows, strict=(False)))",
    ): "all have an entry a position or a kind",
    (
        "strategies/bounds/step_time.py",
        "forward, backward = (min(row[first_kind] for row in table) for table in zip(*pass_tables, strict=True))",
        "forward, backward = (min(row[first_kind] for row in table) for table in zip(*pass_tables, strict=(False)))",
    ): "all have an entry a position or a kind",
    (
        "strategies/bounds/step_time.py",
        "columns = zip(rows, ending.replicated_sums, ending.gather, strict=True)",
        "columns = zip(rows, ending.replicated_sums, ending.gather, strict=(False))",
    ): "all have an entry a position or a kind",
    (
        "strategies/lowering/costs/recompute.py",
        "last_reader = max((saved_tensors[name][1] for name in remade_tensors), default=-1)",
        "last_reader = max((saved_tensors[name][1] for name in remade_tensors), default=-(0))",
    ): "where nothing is made again, when does not matter",
    (
        "strategies/lowering/costs/recompute.py",
        "last_reader = max((saved_tensors[name][1] for name in remade_tensors), default=-1)",
        "last_reader = max((saved_tensors[name][1] for name in remade_tensors), default=-(2))",
    ): "where nothing is made again, when does not matter",
    (
        "strategies/lowering/costs/recompute.py",
        "last_reader = max((saved_tensors[name][1] for name in remade_tensors), default=-1)",
        "last_reader = max((saved_tensors[name][1] for name in remade_tensors), default=(1))",
    ): "where nothing is made again, when does not matter",
}
"""By file, what its line was and what it is now."""
