# SPDX-License-Identifier: Apache-2.0
"""PyTorch: groups over its store, states of optimizers and schedulers."""

import os
import unittest

import support
import tensormount as tm
from torchrun import LIMIT, main, torchrun

try:
    import torch
    import torch.distributed as dist
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
    def test_groups(self):
        torchrun(__file__, 4, ("groups",), real=True)

    def test_without_default_group(self):
        torchrun(__file__, 3, ("without_default_group",), real=True)


class States(support.Folder):
    def test_moments_before_the_first_step(self):
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
        split = torch.optim.AdamW([{"params": [other.weight]}, {"params": [other.bias]}], lr=0.5)
        with self.assertRaises(tm.LayoutError):
            tm.torch.load("S/stepped", model=other, optim=split)

    def test_an_optimizer_that_is_looked_at_stays_as_it_was(self):
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

    def test_schedulers_of_every_kind(self):
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

    def test_scheduler_and_frozen(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        for parameter in model[0].parameters():
            parameter.requires_grad_(False)
        optim = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optim, 1)
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
        schedule.step()
        tm.torch.save("S/small", model=model, optim=optim, extra={"schedule": schedule, "n": 1})
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


if __name__ == "__main__":
    main(globals())
