# SPDX-License-Identifier: Apache-2.0
"""PyTorch: groups over its store, states of optimizers and schedulers."""

import itertools
import os
import tempfile
import unittest
from unittest import mock

import ranks
import support
import tensormount as tm
from torchrun import LIMIT, main, torchrun

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from tensormount.torch import _train
except ImportError as error:
    raise unittest.SkipTest(str(error))


# ---- What ranks do -------------------------------------------------------------------------------


def groups():
    """Groups through torch's store: all ranks, some of them, two at once, none left in the store."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = tm.Group.from_torch()
    second = tm.Group.from_torch()
    assert (first.rank, first.size) == (rank, size)
    halves = [dist.new_group(list(range(0, size, 2))), dist.new_group(list(range(1, size, 2)))]
    half = tm.Group.from_torch(halves[rank % 2])
    assert (half.rank, half.size) == (rank // 2, size // 2)
    jobs = [tm.async_save({"w": torch.arange(5)}, "S/first", first),
            tm.async_save({"w": torch.arange(6)}, "S/second", second),
            tm.async_save({"w": torch.arange(7)}, f"S/half-{rank % 2}", half)]
    for job in jobs:
        job.wait(LIMIT)
    try:
        tm.Group.from_torch(halves[1 - rank % 2])
        raise AssertionError("a group that this rank is not in")
    except tm.UnsupportedError:
        pass
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if hasattr(store, "list_keys"):
        left = [key for key in store.list_keys() if "tensormount" in str(key)]
        assert not left, left
    for group in (first, second, half):
        group.close()


def without_default_group():
    try:
        tm.Group.from_torch()
        raise AssertionError("no default group")
    except tm.UnsupportedError as error:
        assert "from_env" in str(error)
    with tm.Group.from_env() as group:
        assert (group.rank, group.size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        tm.save({"w": torch.arange(group.size)}, "S/env", group)


without_default_group.without_group = True


# ---- Tests ---------------------------------------------------------------------------------------


class Groups(support.Folder):
    def test_torch_process_groups_save_and_load(self):
        torchrun(__file__, 4, ("groups",), real=True)

    def test_other_groups_are_refused_with_the_remedy(self):
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
            try:
                for call in (lambda: tm.save({"n": 1}, "S/a", group=dist.group.WORLD),
                             lambda: tm.load({"n": 0}, "S/a", group=dist.group.WORLD),
                             lambda: tm.Saver(dist.group.WORLD)):
                    with self.assertRaisesRegex(tm.InvalidArgumentError, r"from_torch\(group\)"):
                        call()
            finally:
                dist.destroy_process_group()
        with self.assertRaisesRegex(tm.InvalidArgumentError, "must be a tensormount.Group, not str$"):
            tm.save({"n": 1}, "S/a", group="all")

    def test_group_works_without_a_default_group(self):
        torchrun(__file__, 3, ("without_default_group",), real=True)


class States(support.Folder):
    def test_unstepped_optimizer_loads_moments(self):
        def made():
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 2)
            return model, torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(model, optim):
            optim.zero_grad()
            model(torch.ones(5, 4)).pow(2).mean().backward()
            optim.step()

        model, optim = made()
        step(model, optim)
        tm.torch.save("S/stepped", model=model, optim=optim)
        # Gradients that are there already hinder nothing, and stay.
        other, fresh = made()
        other(torch.ones(5, 4)).sum().backward()
        gradient = other.weight.grad.clone()
        tm.torch.load("S/stepped", model=other, optim=fresh)
        self.assertTrue(torch.equal(fresh.state[other.weight]["exp_avg"],
                                    optim.state[model.weight]["exp_avg"]))
        self.assertEqual(float(fresh.state[other.weight]["step"]), 1)
        self.assertTrue(torch.equal(other.weight.grad, gradient))
        # A save does not count as a step.
        (a, saved), (b, plain) = made(), made()
        tm.torch.save("S/not-stepped", model=a, optim=saved)
        c, loaded = made()
        tm.torch.load("S/not-stepped", model=c, optim=loaded)
        for _ in range(3):
            for one in ((a, saved), (b, plain), (c, loaded)):
                step(*one)
        self.assertTrue(torch.equal(a.weight, b.weight) and torch.equal(a.weight, c.weight))
        # What is not stored is an error, tensors and values alike; `optional` lets it stay.
        extra = {"step": 7, "sched": {"last": 3}}
        for options in ({}, {"not_stored": "raise"}):
            with self.assertRaisesRegex(tm.KeyNotFoundError, "extra.step, extra.sched.last"):
                tm.torch.load("S/stepped", model=other, extra=extra, **options)
        loaded = tm.torch.load("S/stepped", model=other, extra=extra, optional=["extra.*"])
        self.assertEqual(sorted(loaded.not_stored), ["extra.sched.last", "extra.step"])
        self.assertEqual(extra, {"step": 7, "sched": {"last": 3}})
        with self.assertRaisesRegex(tm.KeyNotFoundError, "extra.sched.last"):
            tm.torch.load("S/stepped", model=other, extra=extra, optional=["extra.step"])
        # Groups of parameters that are others are refused, where PyTorch would lose some.
        for groups in ([{"params": [other.weight]}, {"params": [other.bias]}], [{"params": [other.weight]}]):
            with torch.no_grad():
                other.weight.zero_()
            with self.assertRaisesRegex(tm.LayoutError, "no group has the saved parameters bias, weight and otherwise only new"):
                tm.torch.load("S/stepped", model=other, optim=torch.optim.AdamW(groups, lr=0.5), optional=["*"])
            self.assertFalse(other.weight.any())  # Before anything was loaded.

    def test_save_and_load_do_not_change_an_optimizer(self):
        """Bit for bit, for every optimizer of PyTorch, before its first step: saved, loaded as it was,
        and loaded from a later state."""
        more = {"SGD": [{}, {"momentum": 0.9, "dampening": 0.5}], "RMSprop": [{"momentum": 0.9, "centered": True}],
                "Adam": [{}, {"amsgrad": True}], "LBFGS": [{"max_iter": 2}]}
        kinds = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)
                 and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
                 and name not in ("Optimizer", "SparseAdam")]
        self.assertGreater(len(kinds), 10)
        for name in kinds:
            for options in more.get(name, [{}]):
                with self.subTest(optimizer=name, options=options):
                    self.look_at(getattr(torch.optim, name), options)

    def look_at(self, kind, options):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                generator = torch.Generator().manual_seed(5)
                self.w = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
                self.idle = torch.nn.Parameter(torch.tensor([[-0.0, 0.0], [float("inf"), 1.0]]))  # No gradient.

        def made():
            net = Net()
            parameters = [net.w] if kind.__name__ in ("Muon", "LBFGS") else list(net.parameters())
            return net, kind(parameters, lr=0.1, **options)

        def steps(net, optim, count=3):
            for number in range(count):
                def closure():
                    optim.zero_grad()
                    loss = (net.w * (number + 1) - 1).pow(2).sum()
                    loss.backward()
                    return loss

                optim.step(closure)
            return net

        def bits(net, optim):
            state = optim.state_dict()
            return [[p.detach().numpy().tobytes() for p in net.parameters()],
                    [None if p.grad is None else p.grad.numpy().tobytes() for p in net.parameters()],
                    repr(state["param_groups"]),
                    {key: {name: value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value)
                           for name, value in of.items()} for key, of in state["state"].items()}]

        plain, looked = made(), made()
        looked[0].w.grad, plain[0].w.grad = torch.ones(4, 3), torch.ones(4, 3)
        before = bits(*plain)
        tm.torch.save("S/fresh", model=looked[0], optim=looked[1], replace=True)
        self.assertEqual(bits(*looked), before)
        self.assertEqual(len(looked[1].state), len(plain[1].state))
        loaded, stepped = made(), made()
        loaded[0].w.grad = torch.ones(4, 3)
        tm.torch.load("S/fresh", model=loaded[0], optim=loaded[1])
        self.assertEqual(bits(*loaded), before)
        steps(*stepped)
        tm.torch.load("S/fresh", model=stepped[0], optim=stepped[1])  # Back to the begin.
        for one in (plain, looked, loaded, stepped):
            steps(*one)
        wanted = bits(*plain)
        for one in (looked, loaded, stepped):
            self.assertEqual(bits(*one), wanted)
        # A later state, into one that has not stepped.
        missing = made()
        clean = bits(*missing)
        with self.assertRaises((tm.CheckpointNotFoundError, tm.UnsupportedError)):
            tm.torch.load("S/nothing", model=missing[0], optim=missing[1])
        self.assertEqual(bits(*missing), clean)
        try:
            tm.torch.save("S/later", model=plain[0], optim=plain[1], replace=True)
        except tm.UnsupportedError as error:  # LBFGS holds lists of tensors that are views.
            self.assertEqual(kind.__name__, "LBFGS", error)
            return
        try:
            tm.torch.load("S/later", model=missing[0], optim=missing[1])
        except tm.UnsupportedError as error:
            self.assertEqual(kind.__name__, "LBFGS", error)
            self.assertIn("take one step", str(error))
            self.assertEqual(bits(*missing), clean)
            return
        missing[0].w.grad = None
        for one in (plain, missing):
            steps(*one)
        self.assertEqual(bits(*missing), bits(*plain))

    def test_every_kind_of_scheduler_round_trips(self):
        """What they hold besides numbers: counters, functions' places, schedulers of their own."""
        from torch.optim import lr_scheduler as schedulers

        kinds = {
            "step": lambda o: schedulers.StepLR(o, 2),
            "multi": lambda o: schedulers.MultiStepLR(o, [2, 2, 5], gamma=0.5),
            "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
            "cosine": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
            "cycle": lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=20),
            "plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
            "several": lambda o: schedulers.SequentialLR(
                o, [schedulers.LinearLR(o), schedulers.MultiStepLR(o, [1, 3])], [2]),
        }

        def made(kind):
            parameter = torch.nn.Parameter(torch.ones(2))
            optim = torch.optim.SGD([parameter], lr=0.1)
            return optim, kinds[kind](optim)

        def steps(kind, optim, schedule, count):
            rates = []
            for _ in range(count):
                optim.step()
                schedule.step(*([1.0] if kind == "plateau" else []))
                rates.append(optim.param_groups[0]["lr"])
            return rates

        for kind in kinds:
            with self.subTest(kind=kind):
                optim, schedule = made(kind)
                steps(kind, optim, schedule, 3)
                tm.torch.save(f"S/{kind}", extra={"schedule": schedule, "optim": optim})
                fresh, again = made(kind)
                tm.torch.load(f"S/{kind}", extra={"schedule": again, "optim": fresh})
                plain, other = dict(schedule.state_dict()), dict(again.state_dict())
                self.assertEqual(repr(other), repr(plain))
                self.assertEqual(steps(kind, fresh, again, 6), steps(kind, optim, schedule, 6))

    def test_lists_of_other_lengths_are_refused(self):
        optim = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)

        def schedule(epoch=0):
            made = torch.optim.lr_scheduler.StepLR(optim, 1)
            made.last_epoch = epoch
            return made

        tm.torch.save("S/lists", extra={"all": [schedule(5), 5, 6, 7], "of": {"t": (schedule(5), 1)}})
        for wrong, name in ((lambda: {"all": [schedule(), 0]}, "extra.all"),
                            (lambda: {"all": [schedule(), 0, 0, 0, 0, 8]}, "extra.all"),
                            (lambda: {"of": {"t": (schedule(),)}}, "extra.of.t"),
                            (lambda: {"of": [schedule()]}, "extra.of")):
            extra = wrong()
            with self.assertRaisesRegex(tm.LayoutError, name + ": .* items") as caught:
                tm.torch.load("S/lists", extra=extra, optional=["*"])
            self.assertEqual(caught.exception.key, name)

        def resume(group, rank):
            extra = {"all": [schedule(), 0, 0, 0] if rank == 0 else [schedule(), 0]}
            try:
                tm.torch.load("S/lists", extra=extra, group=group)
            finally:
                assert extra["all"][0].last_epoch == 0 and extra["all"][1] == 0

        told = ranks.threads(resume, 2)
        self.assertIsInstance(told[1], tm.LayoutError)
        self.assertRegex(str(told[0]), "rank 1.*extra.all: .* 4 items")
        # At the top: into the list or dict itself, or not at all.
        tm.torch.save("S/top", extra=[schedule(5), 5])
        tm.torch.save("S/plain", extra=[5, 6])
        for name, extra in (("top", [schedule(), 0]), ("plain", [0, 0])):
            loaded = tm.torch.load(f"S/{name}", extra=extra)
            self.assertEqual(extra[-1], 6 if name == "plain" else 5)
            self.assertEqual(loaded.not_stored, [])
        extra = []
        tm.torch.load("S/plain", extra=extra)
        self.assertEqual(extra, [5, 6])
        tm.torch.save("S/both", extra={"n": 5, "d": {"m": 6}})
        for extra in ({}, {"n": 0, "d": {}}):
            tm.torch.load("S/both", extra=extra)
            self.assertEqual(extra, {"n": 5, "d": {"m": 6}})
        for extra in ((0, 0), 7, tm.PerRank([0, 0]), (schedule(), 0)):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "a dict or list was expected"):
                tm.torch.load("S/plain", extra=extra)

    def test_scheduler_and_frozen_parameters_round_trip(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        optim = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        schedule.step()
        tm.torch.save("S/small", model=model, optim=optim, extra={"schedule": schedule, "n": 1})
        # In lists and tuples, beside plain values.
        saved = [schedule, 4, (schedule, {"n": 5})]
        tm.torch.save("S/listed", extra={"all": saved, "own": tm.PerRank({"s": schedule})})
        two = [torch.optim.lr_scheduler.StepLR(optim, 1) for _ in range(3)]
        extra = {"all": [two[0], 0, (two[1], {"n": 0})], "own": tm.PerRank({"s": two[2]})}
        everything = extra["all"]
        tm.torch.load("S/listed", extra=extra)
        self.assertIs(extra["all"], everything)
        self.assertEqual((everything[0], everything[1], everything[2]), (two[0], 4, (two[1], {"n": 5})))
        for one in two:
            self.assertEqual(one.state_dict(), schedule.state_dict())
        other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        for parameter in other[0].parameters():
            parameter.requires_grad_(False)
        fresh = torch.optim.SGD(other[1].parameters(), lr=0.5, momentum=0.9)
        again = torch.optim.lr_scheduler.StepLR(fresh, 1)
        extra = {"schedule": again, "n": 0}
        tm.torch.load("S/small", model=other, optim=fresh, extra=extra)
        self.assertEqual(extra["n"], 1)
        self.assertEqual(again.state_dict(), schedule.state_dict())
        self.assertEqual(fresh.param_groups[0]["lr"], optim.param_groups[0]["lr"])
        for a, b in zip(model.parameters(), other.parameters()):
            self.assertTrue(torch.equal(a, b))
        moments = [s["momentum_buffer"] for s in fresh.state.values()]
        self.assertTrue(all(map(torch.equal, moments,
                                [s["momentum_buffer"] for s in optim.state.values()])))
        # What is missing is said, unless it is allowed by name.
        tm.torch.save("S/weights", model=model)
        with self.assertRaises(tm.KeyNotFoundError):
            tm.torch.load("S/weights", model=other, optim=fresh)
        loaded = tm.torch.load("S/weights", model=other, optim=fresh, optional=["optim.*"])
        self.assertTrue(all(key.startswith("optim.") for key in loaded.not_stored))
        self.assertTrue(loaded.not_stored)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    def train_on(self, *optimizers):
        self.zero_grad()
        self.b(self.a(torch.ones(2, 3))).pow(2).mean().backward()
        for one in optimizers:
            one.step()


class Adapted(Net):
    """With what was added since."""

    def __init__(self):
        super().__init__()
        self.new = torch.nn.Linear(3, 2)

    def train_on(self, *optimizers):
        self.zero_grad()
        self.new(self.b(self.a(torch.ones(2, 3)))).pow(2).mean().backward()
        for one in optimizers:
            one.step()


def save_with_dcp(path, model, optim, extra, **options):
    states = dict(zip(("model", "optim"), get_state_dict(model, optim)))
    dcp.save({**states, "extra": extra}, **(options or {"checkpoint_id": path}))


# Ways to save what `tm.torch.load` loads.
SAVERS = {
    "tm": lambda path, model, optim, extra: tm.torch.save(path, model=model, optim=optim, extra=extra),
    "dcp": save_with_dcp,
    "writer": lambda path, *states: save_with_dcp(path, *states, storage_writer=tm.torch.Writer(path)),
}


class Absent(support.Folder):
    """What models, optimizers and schedulers have now and had not when they were saved."""

    def test_added_parameters_start_without_moments(self):
        kinds = {"AdamW": {"lr": 0.1}, "SGD": {"lr": 0.1}, "SGD+": {"lr": 0.1, "momentum": 0.9}}

        def optimizer(kind, groups):
            return getattr(torch.optim, kind.rstrip("+"))(groups, **kinds[kind])

        def bits(optim, named):
            return {name: {slot: value.numpy().tobytes() for slot, value in optim.state.get(parameter, {}).items()
                           if isinstance(value, torch.Tensor)}
                    for name, parameter in named if not name.startswith("new.")}

        for kind, saver in itertools.product(kinds, SAVERS):
            source = os.path.abspath(f"S-{saver}/{kind}")
            net = Net()
            optim = optimizer(kind, [{"params": net.a.parameters(), "lr": 0.3}, {"params": net.b.parameters()}])
            for _ in range(2):
                net.train_on(optim)
            SAVERS[saver](source, net, optim, {"n": 1})
            for where in ("in a group", "a group"):
                for stepped in (False, True):
                    with self.subTest(kind=kind, saver=saver, where=where, stepped=stepped):
                        other = Adapted()
                        groups = [{"params": list(other.b.parameters())}, {"params": list(other.a.parameters())}]
                        if where == "a group":
                            groups.append({"params": list(other.new.parameters()), "lr": 0.7})
                        else:
                            groups[0]["params"][:0] = other.new.parameters()
                        fresh = optimizer(kind, groups)
                        if stepped:
                            other.train_on(fresh)
                        before = other.new.weight.detach().clone()
                        kept = {slot: str(value) for slot, value in fresh.state.get(other.new.weight, {}).items()}
                        old = other.a.weight.detach().clone()
                        for options in ({}, {"optional": ["model.*"]}, {"optional": ["optim.*"]}):
                            with self.assertRaisesRegex(tm.KeyNotFoundError, "new[.](bias|weight)"):
                                tm.torch.load(source, model=other, optim=fresh, **options)
                        self.assertTrue(torch.equal(other.a.weight, old))
                        loaded = tm.torch.load(source, model=other, optim=fresh, optional=["*new*"])
                        self.assertTrue(torch.equal(other.a.weight, net.a.weight))
                        self.assertTrue(torch.equal(other.new.weight, before))
                        found = fresh.state.get(other.new.weight, {})
                        self.assertEqual({slot: str(value) for slot, value in found.items()}, kept)
                        self.assertEqual(bits(fresh, other.named_parameters()), bits(optim, net.named_parameters()))
                        self.assertEqual([group["lr"] for group in fresh.param_groups],
                                         [0.1, 0.3] + [0.7] * (where == "a group"))
                        self.assertEqual([len(group["params"]) for group in fresh.param_groups],
                                         [2, 2, 2] if where == "a group" else [4, 2])
                        self.assertEqual([set(group["params"]) for group in loaded.state["optim"]["param_groups"]],
                                         [{name for name, p in other.named_parameters() if any(p is one for one in group["params"])}
                                          for group in fresh.param_groups])
                        self.assertIn("model.new.weight", loaded.not_stored)
                        self.assertEqual("optim.param_groups.2" in loaded.not_stored, where == "a group")
                        self.assertTrue(any(name.startswith("optim.state.new.bias") for name in loaded.not_stored))
                        other.train_on(fresh)
        # A stored group without parameters that has some now, and one that is gone.
        net, other = Net(), Adapted()
        tm.torch.save("S-tm/empty", model=net, optim=torch.optim.SGD([{"params": net.parameters()}, {"params": []}]))
        known = [*other.a.parameters(), *other.b.parameters()]
        for groups in ([{"params": known}, {"params": other.new.parameters()}], [{"params": known}]):
            with self.assertRaisesRegex(tm.LayoutError, "no group matches the saved group 1, which had no parameters"):
                tm.torch.load("S-tm/empty", model=other, optim=torch.optim.SGD(groups), optional=["*"])
        # As many groups, but of others: nothing is put where it does not belong.
        other = Net()
        old = other.a.weight.detach().clone()
        mixed = torch.optim.SGD([{"params": [other.a.weight, other.b.weight]}, {"params": [other.a.bias, other.b.bias]}], lr=9)
        with self.assertRaisesRegex(tm.LayoutError, "different parameter groups"):
            tm.torch.load("S-tm/SGD+", model=other, optim=mixed)
        self.assertTrue(torch.equal(other.a.weight, old))
        self.assertEqual([group["lr"] for group in mixed.param_groups], [9, 9])
        # Of several ranks all hear of it, whoever lacks it.
        def resume(group, rank, optional=([], []), kinds=(Net, Adapted)):
            other = kinds[rank]()
            optim = torch.optim.SGD(other.parameters(), lr=0.1)
            return tm.torch.load("S-tm/one-group", model=other, optim=optim, group=group, optional=optional[rank])

        net = Net()
        tm.torch.save("S-tm/one-group", model=net, optim=torch.optim.SGD(net.parameters(), lr=0.1))
        outcomes = ranks.threads(resume, 2)
        for error in outcomes:
            self.assertIsInstance(error, tm.KeyNotFoundError)
            self.assertIn("optim.state.new.weight", str(error))
        self.assertEqual(outcomes[0].rank, 1)
        for globs in ((["*new*"], ["*new*"]), (["*n*"], ["*new*"])):
            outcomes = ranks.threads(lambda group, rank, globs=globs: resume(group, rank, globs, (Adapted, Adapted)), 2)
            if globs[0] == globs[1]:
                self.assertIn("optim.state.new.weight", outcomes[1].not_stored)
                self.assertTrue(torch.equal(outcomes[0].state["model"]["a.weight"], net.a.weight))
                continue
            for error in outcomes:
                self.assertRegex(str(error), "other options than on rank 0")

    def test_dicts_that_are_values_of_other_programs_stay_dicts(self):
        stored = {"model": {"w": torch.ones(2)}, "train": {"cfg": {1: 2, 0: 3}, "none": {}, "list": [{}, {0: 5}]}, "step": 3}
        torch.save(stored, "dicts.pt")
        for request in ({"cfg": {0: None, 1: None}, "none": {}, "list": []}, {"cfg": {}}):
            into = {"model": {"w": torch.zeros(2)}, "train": request, "step": 0}
            tm.load(into, "dicts.pt")
            self.assertEqual(into["train"], {key: stored["train"][key] for key in request})
            self.assertEqual(into["step"], 3)

    def test_missing_optimizer_slot_is_reported(self):
        net = Net()
        optim = torch.optim.AdamW([{"params": net.a.parameters()}, {"params": net.b.parameters()}])
        net.train_on(optim)
        del optim.state[net.b.bias]  # As if it had no gradient: it is saved without moments.
        tm.torch.save("S/without", model=net, optim=optim)
        del optim.state[net.a.weight]["exp_avg"]
        tm.torch.save("S/alone-of-its-kind", model=net, optim=optim)  # Another shape than the bias has.
        del optim.state[net.a.bias]["exp_avg_sq"]
        optim = torch.optim.AdamW(net.parameters())
        net.train_on(optim)
        del optim.state[net.b.weight]["exp_avg"]

        with self.assertRaisesRegex(tm.LayoutError, "parameter b.weight has no exp_avg") as caught:
            tm.torch.save("S/never", model=net, optim=optim)
        self.assertEqual(caught.exception.key, "optim.state.b.weight.exp_avg")
        whole = Net()
        stepped = torch.optim.AdamW(whole.parameters())
        whole.train_on(stepped)

        def save(group, rank):
            model, own = (net, optim) if rank else (whole, stepped)
            return tm.torch.save("S/never", model=model, optim=own, group=group)

        told = ranks.threads(save, 2)
        self.assertRegex(str(told[0]), "rank 1.*parameter b.weight has no exp_avg")
        self.assertFalse(os.path.exists("S/never"))
        # An optimizer of somebody else's, whose slots depend on names or sizes: it is told once, and saved.
        class EightBit(torch.optim.AdamW):
            pass

        own = EightBit(whole.parameters())
        whole.train_on(own)
        del own.state[whole.b.weight]["exp_avg_sq"]
        with self.assertLogs("tensormount", "WARNING") as told:
            for _ in range(2):
                tm.torch.save("S/eight-bit", model=whole, optim=own, replace=True)
        self.assertEqual(len(told.output), 1)
        self.assertRegex(told.output[0], "parameter b.weight has no exp_avg_sq.*EightBit")
        # An option that was switched on or off: slots of what had its first gradient since are others.
        whole = Net()
        own = torch.optim.AdamW(whole.parameters(), amsgrad=True)
        whole.train_on(own)
        own.param_groups[0]["amsgrad"] = False
        del own.state[whole.b.weight]["max_exp_avg_sq"]
        tm.torch.save("S/option", model=whole, optim=own)

    @unittest.skipUnless(hasattr(torch.optim, "Adafactor"), "an older PyTorch")
    def test_model_hook_that_renames_parameters_works(self):
        whole = Net()
        own = torch.optim.Adafactor(whole.parameters())
        whole.train_on(own)
        tm.torch.save("S/adafactor", model=whole, optim=own)
        with mock.patch.object(_train, "get_model_state_dict", lambda model, options: {
                f"base.{name}": value for name, value in model.state_dict().items()}):
            tm.torch.save("S/hooked", model=whole, optim=own)

    def test_optimizer_group_options_load(self):
        def made(*order):
            net = Net()
            parts = {"a": {"params": list(net.a.parameters()), "lr": 0.1}, "b": {"params": list(net.b.parameters()), "lr": 0.2}}
            return net, torch.optim.AdamW([parts[name] for name in order])

        net, optim = made("a", "b")
        net.train_on(optim)
        del optim.param_groups[1]["maximize"]
        optim.param_groups[1]["own"] = 7
        tm.torch.save("S/groups", model=net, optim=optim, extra={"n": 1})
        # A scheduler adds initial_lr, a newer PyTorch an option; here the groups have another order, too.
        other, fresh = made("b", "a")
        schedule = torch.optim.lr_scheduler.StepLR(fresh, 1)
        for group in fresh.param_groups:
            group.update(lr=0.5, newer=[group["lr"]], own=9)
        for options in ({}, {"not_stored": "ignore"}, {"optional": ["extra.*"]}):
            loaded = tm.torch.load("S/groups", model=other, optim=fresh, **options)
            self.assertEqual(sorted(loaded.not_stored), sorted(f"optim.param_groups.{name}" for name in (
                "0.initial_lr", "0.newer", "0.own", "1.initial_lr", "1.newer", "1.maximize")))
            found = [[group[key] for key in ("lr", "initial_lr", "newer", "own", "maximize")] for group in fresh.param_groups]
            self.assertEqual(found, [[0.2, 0.2, [0.2], 7, False], [0.1, 0.1, [0.1], 9, False]])
            fresh.param_groups[0]["own"] = 9
            self.assertEqual(float(fresh.state[other.b.weight]["exp_avg"][0, 0]), float(optim.state[net.b.weight]["exp_avg"][0, 0]))
        # The same by other names, where a rule says so.
        with torch.no_grad():
            other.a.weight.zero_()
        tm.torch.save("S/plain", model=net, optim=optim)
        tm.save({"net": net.state_dict(), "opt": tm.open("S/plain").state(torch=True)["optim"]}, "S/renamed")
        rules = [{"prefix": "net.", "to": "model."}, {"prefix": "opt.", "to": "optim."}]
        for more in ([], [{"drop": "opt.state.*"}]):
            fresh = torch.optim.AdamW([{"params": other.a.parameters()}, {"params": other.b.parameters()}], lr=9)
            options = {"optional": ["optim.state.*"]} if more else {}
            tm.torch.load("S/renamed", model=other, optim=fresh, key_map=more + rules, **options)
            self.assertTrue(torch.equal(other.a.weight, net.a.weight))
            self.assertEqual(([group["lr"] for group in fresh.param_groups], len(fresh.state)), ([0.1, 0.2], 0 if more else 4))
        # What a scheduler has besides is an error that says what helps.
        tm.torch.save("S/schedule", extra={"schedule": schedule})
        schedule.newer, schedule.newest = 1, {"x[0]": 2}
        with self.assertRaisesRegex(tm.KeyNotFoundError, r"newer, .*; optional=\['extra.schedule.newer', '.*x\[\[\]0\]'\] allows") as caught:
            tm.torch.load("S/schedule", extra={"schedule": schedule})
        self.assertEqual(caught.exception.key, "extra.schedule.newer")
        schedule.newer = 3
        with self.assertRaisesRegex(tm.KeyNotFoundError, r"optional=\['model.a.bias'\]"):
            tm.torch.load("S/schedule", model=Net())
        loaded = tm.torch.load("S/schedule", extra={"schedule": schedule}, optional=["extra.schedule.new*"])
        self.assertEqual(loaded.not_stored, ["extra.schedule.newer", "extra.schedule.newest.x[0]"])
        self.assertEqual(schedule.newer, 3)
        for wrong in ("extra.*", [5]):
            with self.assertRaisesRegex(tm.InvalidArgumentError, "optional=.*a list of globs"):
                tm.torch.load("S/schedule", extra={"schedule": schedule}, optional=wrong)

    def test_placeholder_moments_are_removed_if_not_loaded(self):
        """Are as if nobody had loaded: for NAdam another first step would show."""
        def made():
            net = Net()
            return net, [torch.optim.NAdam(part.parameters(), lr=0.1) for part in (net.a, net.b)]

        net, both = made()
        net.train_on(*both)
        tm.torch.save("S/one", model=net, optim=both[0])
        weights = {f"model.{key}": value.clone() for key, value in net.state_dict().items()}
        tm.save({**weights}, "S/weights")

        def moments(optim, parameter):
            return {key: value.tolist() for key, value in optim.state.get(parameter, {}).items()}

        for source, options in (("S/weights", {"not_stored": "ignore"}), ("S/weights", {"strict_exempt": ["optim.*"]}),
                                ("S/weights", {"optional": ["optim.*"]})):
            other, fresh = made()
            with self.subTest(source=source, options=options):
                options = dict(options)
                tm.torch.load(source, model=other, optim=fresh, **options)
                self.assertEqual([len(one.state) for one in fresh], [0, 0])
        # One of two has stepped, and keeps what it has; the other one has not.
        other, fresh = made()
        other.train_on(fresh[0])
        before = moments(fresh[0], other.a.weight)
        tm.torch.load("S/weights", model=other, optim=fresh, not_stored="ignore")
        self.assertEqual((moments(fresh[0], other.a.weight), len(fresh[1].state)), (before, 0))
        other.load_state_dict(net.state_dict())
        expected, plain = made()
        expected.train_on(plain[0])
        expected.load_state_dict(net.state_dict())
        for model, optimizers in ((other, fresh), (expected, plain)):
            model.train_on(*optimizers)
        self.assertTrue(torch.equal(other.b.weight, expected.b.weight))

    def test_early_error_of_one_rank_is_raised_on_all(self):
        net = Net()
        optim = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        net.train_on(optim)
        tm.torch.save("S/net", model=net, optim=optim, extra={"n": 1})

        class Broken:
            def state_dict(self):
                raise RuntimeError("no state today")

        def wrong(group, rank, what):
            other = Net()
            with torch.no_grad():
                other.a.weight.zero_()
            optim = torch.optim.LBFGS(other.parameters()) if what == "optim" and rank else torch.optim.SGD(
                other.parameters(), lr=1, momentum=0.9)
            extra = {"extra": Broken(), "value": {"m": 0}}.get(what) if rank else {"n": 0}
            extra = {"n": 0, "x": extra} if isinstance(extra, Broken) else extra or {"n": 0}
            try:
                if what == "save":
                    return tm.torch.save("S/never", extra={"x": Broken()} if rank else {"x": 1}, group=group)
                if what == "saver":
                    with tm.Saver(group) as saver:
                        return tm.torch.async_save("S/never", extra={"x": Broken()} if rank else {"x": 1}, saver=saver).wait()
                return tm.torch.load("S/net", model=other, optim=optim, extra=extra, group=group,
                                     optional="n" if what == "optional" and rank else ["z"])
            finally:
                assert not other.a.weight.any(), "something was loaded"

        for what, said in (("optim", "LBFGS"), ("extra", "no state today"), ("value", "extra.m"), ("optional", "optional="),
                           ("save", "no state today"), ("saver", "no state today|rank 1")):
            with self.subTest(what=what):
                outcomes = ranks.threads(lambda group, rank, what=what: wrong(group, rank, what), 2)
                self.assertRegex(str(outcomes[1]), said if what != "saver" else "no state today")
                self.assertIsInstance(outcomes[0], tm.Error)
                self.assertRegex(str(outcomes[0]), f"rank 1.*({said})")
                self.assertEqual(outcomes[0].rank, 1)
        self.assertFalse(os.path.exists("S/never"))


if __name__ == "__main__":
    main(globals())
