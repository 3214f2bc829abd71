"""Mutants that no test can notice, and why."""

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "simulator/machine/compute.py",
        "wide = ITEMSIZE[block.tensor[operator.inputs[0]].dtype]",
        "wide = ITEMSIZE[block.tensor[operator.inputs[(-1)]].dtype]",
    ): "both operands of a product have one dtype",
    (
        "strategies/lowering/costs/optimizer.py",
        'return in_time and plan.gradient_reduction == "all_reduce" and ITEMSIZE[training.dtype] > 2',
        'return in_time and plan.gradient_reduction == "all_reduce" and ITEMSIZE[training.dtype] > (3)',
    ): "no dtype has 3 bytes",
    (
        "strategies/explanation/sensitivity.py",
        "if beaten.stays or abs(log(edge)) <= NEARER:",
        "if beaten.stays or (abs(log(edge)) < NEARER):",
    ): "an edge is found to the same fraction either way, and bisection never ends just there",
    (
        "strategies/bounds/step_time.py",
        'if plan.schedule == "naive" and sends is not None:  # one microbatch after another, there and back',
        "if (plan.schedule == 'naive'):  # one microbatch after another, there and back",
    ): "stages of naive adjoin, so that there are sends; the rest is for the checker of types",
    (
        "strategies/bounds/step_time.py",
        "return [sum(each) + sum(norm) for each in zip(reduced, replicated, squares, steps, gather, strict=True)]",
        "return [sum(each) + sum(norm) for each in zip(reduced, replicated, squares, steps, gather, strict=(False))]",
    ): "all columns have an entry a position",
    (
        "strategies/lowering/rank_classes/placement.py",
        "return parts[0] if len(parts) == 1 else np.concatenate(parts)",
        "return parts[0] if len(parts) == (0) else np.concatenate(parts)",
    ): "one part concatenated is that part, copied",
    (
        "strategies/operators/costs.py",
        "for axis, elements in zip(OPERATOR_AXES, parts, strict=True):",
        "for axis, elements in zip(OPERATOR_AXES, parts, strict=(False)):",
    ): "there is one part an axis",
    (
        "strategies/operators/costs.py",
        "norm = machine.communicator(NORM, 0).ticks(*SQUARES) if NORM in machine.table.tables else 0",
        "norm = machine.communicator(NORM, (-1)).ticks(*SQUARES) if NORM in machine.table.tables else 0",
    ): "all ranks of a mesh of operator axes are one group",
    (
        "strategies/operators/costs.py",
        "states = sum(change.size for change in resident(bare, training, plan, held, 0, 0))",
        "states = sum(change.size for change in resident(bare, training, plan, held, 0, (1)))",
    ): "of whose memory it is does not change its size",
    (
        "strategies/operators/costs.py",
        "states = sum(change.size for change in resident(bare, training, plan, held, 0, 0))",
        "states = sum(change.size for change in resident(bare, training, plan, held, 0, (-1)))",
    ): "of whose memory it is does not change its size",
    (
        "strategies/explanation/sensitivity.py",
        "_edge(outcome, times, plan, first, far) for first, far in zip(outcomes, (1 / REACH, REACH), strict=True)",
        "_edge(outcome, times, plan, first, far) for first, far in zip(outcomes, (1 / REACH, REACH), strict=(False))",
    ): "there are two of both",
    (
        "strategies/explanation/sensitivity.py",
        "while abs(beaten - stays) > NEARER:",
        "while (abs(beaten - stays) >= NEARER):",
    ): "halving the logarithm of a factor never comes to just that",
    (
        "strategies/lowering/costs/liveness.py",
        'return f"{known} in fp8", size * ITEMSIZE["fp8"] // ITEMSIZE[self.block.tensor[name].dtype]',
        "return f\"{known} in fp8\", (size / ITEMSIZE['fp8']) // ITEMSIZE[self.block.tensor[name].dtype]",
    ): "an element in fp8 is one byte",
    (
        "strategies/lowering/costs/liveness.py",
        'return f"{known} in fp8", size * ITEMSIZE["fp8"] // ITEMSIZE[self.block.tensor[name].dtype]',
        'return f"{known} in fp8", size // ITEMSIZE[self.block.tensor[name].dtype]',
    ): "an element in fp8 is one byte",
    (
        "strategies/lowering/costs/liveness.py",
        "if have is None or have.cuts == wanted.cuts:",
        "if (have is None):",
    ): "no exchange leaves cuts as they are",
    (
        "strategies/lowering/costs/liveness.py",
        "if operator.kind in PRODUCTS and operator.outputs[0] in self._classified:",
        "if operator.kind in PRODUCTS and operator.outputs[(-1)] in self._classified:",
    ): "what makes logits makes nothing else",
    (
        "strategies/lowering/costs/liveness.py",
        "found[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]",
        "found[operator.outputs[(-1)]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]",
    ): "what makes logits makes nothing else",
    (
        "strategies/lowering/costs/liveness.py",
        "found[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[0]].dtype]",
        "found[operator.outputs[0]] = ITEMSIZE[self.block.tensor[operator.inputs[(-1)]].dtype]",
    ): "both operands of a product have one dtype",
    (
        "strategies/lowering/costs/liveness.py",
        "born = dict.fromkeys(self.block.inputs, 0)",
        "born = dict.fromkeys(self.block.inputs, (-1))",
    ): "no operator is before the first",
    (
        "strategies/lowering/costs/liveness.py",
        "end = dict.fromkeys((group[name] for name in self.block.inputs if name in group), 0)",
        "end = dict.fromkeys((group[name] for name in self.block.inputs if name in group), (-1))",
    ): "no operator is before the first",
    (
        "strategies/lowering/costs/liveness.py",
        "size[group[name]] = max(size.get(group[name], 0), self.share(operator, name))",
        "size[group[name]] = max(size.get(group[name], (1)), self.share(operator, name))",
    ): "a tensor has at least one byte",
    (
        "strategies/lowering/costs/liveness.py",
        "size[group[name]] = max(size.get(group[name], 0), self.share(operator, name))",
        "size[group[name]] = max(size.get(group[name], (-1)), self.share(operator, name))",
    ): "a tensor has at least one byte",
    (
        "strategies/lowering/costs/liveness.py",
        "return [(name, most, end.get(name, 0), begin[name]) for name, most in size.items()]",
        "return [(name, most, end.get(name, (-1)), begin[name]) for name, most in size.items()]",
    ): "no operator is before the first",
    (
        "strategies/lowering/costs/liveness.py",
        "other, one = group[name], group[operator.outputs[0]]",
        "other, one = group[name], group[operator.outputs[(-1)]]",
    ): "a sum has one result",
    (
        "strategies/lowering/costs/liveness.py",
        "return operator.outputs[0] in self._logits",
        "return operator.outputs[(-1)] in self._logits",
    ): "what makes logits makes nothing else",
    (
        "simulator/collectives/choose.py",
        "if seconds < best * (1 - 1e-12):",
        "if seconds < (best / (1 - 1e-12)):",
    ): "two algorithms that differ by rounding alone are both fastest",
    (
        "simulator/collectives/choose.py",
        "if seconds < best * (1 - 1e-12):",
        "if seconds < best * ((1 + 1e-12)):",
    ): "two algorithms that differ by rounding alone are both fastest",
    (
        "simulator/collectives/choose.py",
        "if seconds < best * (1 - 1e-12):",
        "if seconds < best * (1 - (2e-12)):",
    ): "two algorithms that differ by rounding alone are both fastest",
    (
        "simulator/collectives/choose.py",
        "if len(picked) == 1:",
        "if len(picked) == (0):",
    ): "a single algorithm is picked whatever it takes; its phases are only not computed",
    (
        "simulator/collectives/choose.py",
        "alone = float(np.max(phase.load[first:last] / bandwidth[phase.link[first:last]], initial=0.0))",
        "alone = float(np.max(phase.load[first:last] / bandwidth[phase.link[first:last]], initial=(-1.0)))",
    ): "every phase loads a link",
    (
        "simulator/collectives/traffic.py",
        "_SPARSE = 4",
        "_SPARSE = (3)",
    ): "both ways of adding rows up give the same",
    (
        "simulator/collectives/traffic.py",
        "if num_groups * num_links <= _SPARSE * len(key):",
        "if (num_groups * num_links < _SPARSE * len(key)):",
    ): "both ways of adding rows up give the same",
    (
        "simulator/collectives/traffic.py",
        "if num_groups * num_links <= _SPARSE * len(key):",
        "if num_groups <= _SPARSE * len(key):",
    ): "both ways of adding rows up give the same",
    (
        "simulator/collectives/traffic.py",
        "if len(parts) == 1:",
        "if len(parts) == (0):",
    ): "rows that are added up already are what they were",
    (
        "simulator/collectives/traffic.py",
        "first = np.flatnonzero(np.diff(pair, prepend=-1))",
        "first = np.flatnonzero(np.diff(pair, prepend=(1)))",
    ): "the first pair is number 0, and the order of rows changes no sum",
    (
        "simulator/collectives/traffic.py",
        "hop = np.arange(len(pair)) - np.repeat(first, np.diff(first, append=len(pair)))",
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
        "np.max([part.longest for part in parts], axis=0),",
        "np.max([part.longest for part in parts], axis=(1)),",
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
        "load = used.load * np.where(sends[used.link], sent, received) / cluster.library.reduction",
        "load = np.where(sends[used.link], sent, received) / cluster.library.reduction",
    ): "in a ring behind a switch every port carries one byte each way",
    (
        "simulator/collectives/in_switch.py",
        "part = placement if len(chosen) == len(groups) else place(cluster, ordered[chosen])",
        "part = place(cluster, ordered[chosen])",
    ): "all groups placed again are placed as before",
    (
        "simulator/collectives/torus.py",
        "boxes = np.sort(groups[chosen], axis=1).reshape(-1, *shape[shape > 1])",
        "boxes = np.sort(groups[chosen], axis=1).reshape(-(2), *shape[shape > 1])",
    ): "numpy takes any negative length for the one that is left",
    (
        "strategies/bounds/group_bounds.py",
        'plan = complete(self.problem, replace(family, schedule="gpipe", stages="balanced", zero=2))',
        'plan = complete(self.problem, replace(family, schedule="gpipe", stages="balanced", zero=(3)))',
    ): "gradients leave whole with ZeRO 3 as with ZeRO 2",
    (
        "strategies/bounds/group_bounds.py",
        "rank = self.costs.machine(plan).rank(0)",
        "rank = self.costs.machine(plan).rank((-1))",
    ): "devices are alike where this is asked",
    (
        "strategies/bounds/group_bounds.py",
        "self._computing[key] = sum(ticks[name] * n for name, n in runs), min(layers, default=0)",
        "self._computing[key] = sum(ticks[name] * n for name, n in runs), min(layers, default=(1))",
    ): "a network without layers has none on any rank",
    (
        "strategies/bounds/group_bounds.py",
        "self._computing[key] = sum(ticks[name] * n for name, n in runs), min(layers, default=0)",
        "self._computing[key] = sum(ticks[name] * n for name, n in runs), min(layers, default=(-1))",
    ): "a network without layers has none on any rank",
    (
        "strategies/bounds/group_bounds.py",
        "plan = replace(_with(plan, states[0]._replace(offload=NOTHING)), recompute=Recompute.NONE)",
        "plan = replace(_with(plan, states[(-1)]._replace(offload=NOTHING)), recompute=Recompute.NONE)",
    ): "passes cost and keep the same under all states of a class",
    (
        "strategies/bounds/group_bounds.py",
        "if limit < inf and self._times(plan, quickest, states).min() >= limit:",
        "if (self._times(plan, quickest, states).min() >= limit):",
    ): "no time is infinite",
    (
        "strategies/bounds/group_bounds.py",
        "if limit < inf and self._times(plan, quickest, states).min() >= limit:",
        "if (limit <= inf) and self._times(plan, quickest, states).min() >= limit:",
    ): "no time is infinite",
    (
        "strategies/bounds/group_bounds.py",
        "if limit < inf and self._times(plan, quickest, states).min() >= limit:",
        "if limit < inf and (self._times(plan, quickest, states).min() > limit):",
    ): "what takes as long as the limit is left out of the table anyway",
    (
        "strategies/bounds/group_bounds.py",
        "hopeful = np.flatnonzero(times.min(axis=1) < limit)",
        "hopeful = np.flatnonzero((times.min(axis=1) <= limit))",
    ): "what takes as long as the limit is left out of the table anyway",
    (
        "strategies/bounds/group_bounds.py",
        "activations, row_of = self._activations(plan, passes, late=self._late(plan, states[0]))",
        "activations, row_of = self._activations(plan, passes, late=self._late(plan, states[(-1)]))",
    ): "passes cost and keep the same under all states of a class",
    (
        "strategies/bounds/group_bounds.py",
        "rows = [one.partly(two, recompute.layers) for one, two in zip(never, again, strict=True)]",
        "rows = [one.partly(two, recompute.layers) for one, two in zip(never, again, strict=(False))]",
    ): "both have an entry each",
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
        "return _each(zip(self.costs.division(plan).kind_of, ends, plan.positions, strict=True))",
        "return _each(zip(self.costs.division(plan).kind_of, ends, plan.positions, strict=(False)))",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "fraction = away[position if len(away) > 1 else 0] if away else 0.0",
        "fraction = away[position if len(away) > 1 else 0] if away else (-1.0)",
    ): "no layers come before the first",
    (
        "strategies/bounds/group_bounds.py",
        "edges = sorted({0, count, *(min(max(edge, 0), count) for edge in (first, gone))})",
        "edges = sorted({0, count, *(min(max(edge, (1)), count) for edge in (first, gone))})",
    ): "an edge only says where to look anew",
    (
        "strategies/bounds/group_bounds.py",
        "backward, work = (two - one for one, two in zip(self.layers[least], again.layers[least], strict=True))",
        "backward, work = (two - one for one, two in zip(self.layers[least], again.layers[least], strict=(False)))",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "work = sum(each * count for each, (_, count) in zip(works, runs, strict=True))",
        "work = sum(each * count for each, (_, count) in zip(works, runs, strict=(False)))",
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
        "for (cost, count), each, layer in zip(runs, works, layers, strict=True):",
        "for (cost, count), each, layer in zip(runs, works, layers, strict=(False)):",
    ): "both have an entry each",
    (
        "strategies/bounds/group_bounds.py",
        "for _ in range(count if layer else 0):",
        "for _ in range(count if layer else (-1)):",
    ): "a range up to a negative number is empty",
    (
        "strategies/bounds/group_bounds.py",
        "return (forward, 0, 0, 0) if late else (forward, memory.backward, memory.inputs, memory.weights)",
        "return (forward, (-1), 0, 0) if late else (forward, memory.backward, memory.inputs, memory.weights)",
    ): "the forward before it holds no less",
    (
        "strategies/bounds/group_bounds.py",
        "return (forward, 0, 0, 0) if late else (forward, memory.backward, memory.inputs, memory.weights)",
        "return (forward, 0, (-1), 0) if late else (forward, memory.backward, memory.inputs, memory.weights)",
    ): "the forward before it holds no less",
    (
        "strategies/bounds/group_bounds.py",
        "return (forward, 0, 0, 0) if late else (forward, memory.backward, memory.inputs, memory.weights)",
        "return (forward, 0, 0, (-1)) if late else (forward, memory.backward, memory.inputs, memory.weights)",
    ): "the forward before it holds no less",
    (
        "strategies/bounds/group_bounds.py",
        "rows = actions(name, ranks, few if exists else microbatches, chunks)",
        "rows = actions(name, ranks, microbatches, chunks)",
    ): "more microbatches only take longer to look at",
    (
        "strategies/bounds/group_bounds.py",
        "FEW = 4",
        "FEW = (5)",
    ): "three microbatches a rank already fill every schedule",
    (
        "strategies/bounds/group_bounds.py",
        "FEW = 4",
        "FEW = (3)",
    ): "three microbatches a rank already fill every schedule",
    (
        "strategies/bounds/group_bounds.py",
        "FEW = 4",
        "FEW = (8)",
    ): "three microbatches a rank already fill every schedule",
    (
        "strategies/bounds/step_time.py",
        "alone = (0,) * plan.pipeline if any(plan.offload.optimizer) else optimizer  # the rest runs beneath passes",
        "alone = (0,) * plan.pipeline if all(plan.offload.optimizer) else optimizer  # the rest runs beneath passes",
    ): "without a flush hosts make whole updates",
    (
        "strategies/bounds/step_time.py",
        "self._loads[key] = _Loads(*zip(*positions, strict=True))",
        "self._loads[key] = _Loads(*zip(*positions, strict=(False)))",
    ): "all have an entry a position or a kind",
    (
        "strategies/bounds/step_time.py",
        "forward, backward = (min(row[first] for row in rows) for rows in zip(*found, strict=True))",
        "forward, backward = (min(row[first] for row in rows) for rows in zip(*found, strict=(False)))",
    ): "all have an entry a position or a kind",
    (
        "strategies/bounds/step_time.py",
        "each = zip(rows, ending.replicated, ending.gather, strict=True)",
        "each = zip(rows, ending.replicated, ending.gather, strict=(False))",
    ): "all have an entry a position or a kind",
    (
        "strategies/lowering/costs/recompute.py",
        "last = max((saved[name][1] for name in remade), default=-1)",
        "last = max((saved[name][1] for name in remade), default=-(0))",
    ): "where nothing is made again, when does not matter",
    (
        "strategies/lowering/costs/recompute.py",
        "last = max((saved[name][1] for name in remade), default=-1)",
        "last = max((saved[name][1] for name in remade), default=-(2))",
    ): "where nothing is made again, when does not matter",
    (
        "strategies/lowering/costs/recompute.py",
        "last = max((saved[name][1] for name in remade), default=-1)",
        "last = max((saved[name][1] for name in remade), default=(1))",
    ): "where nothing is made again, when does not matter",
}
"""By file, what its line was and what it is now."""
