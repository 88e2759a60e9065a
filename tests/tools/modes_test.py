# SPDX-License-Identifier: Apache-2.0
"""What other users may see through a mount with --allow-other: what they may without it, or less. Each arrangement of
owners, modes, access lists and folders is tried by several users, directly and through the mount."""

import json
import os
import pathlib
import shutil
import struct
import tempfile
import time

import harness

# uid, gid, other groups. The first owns nothing and is in no group.
NOBODY, MEMBER, OTHER_MEMBER, ALICE = (65534, 65534, []), (65533, 65533, [4242]), (65532, 65532, [4343]), (4242, 4242, [])
USERS = {"nobody": NOBODY, "member": MEMBER, "other member": OTHER_MEMBER, "alice": ALICE}
GROUP, OTHER_GROUP = 4242, 4343
EVERYBODY = set(USERS)


def acl(owner, group, other, mask=None, users=(), groups=()):
    """system.posix_acl_access as the kernel encodes it."""
    entries = [(1, owner, -1), *((2, bits, uid) for uid, bits in users), (4, group, -1), *((8, bits, gid) for gid, bits in groups)]
    entries += [(16, mask, -1)] if mask is not None else []
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", tag, bits, number & 0xFFFFFFFF) for tag, bits, number in entries + [(32, other, -1)])


def as_user(user, action):
    """What `action` returned (JSON) in a process of that user."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            uid, gid, groups = user
            os.setgroups(groups)
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.write(writes, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return json.loads(said)


def can_read(path):
    try:
        with open(path, "rb") as file:
            file.read(1)
        return True
    except OSError:
        return False


def can_list(path):
    try:
        os.listdir(path)
        return True
    except OSError:
        return False


class ModesTest(harness.ToolTest):
    def setUp(self):
        harness.need_fuse()
        harness.need("root", os.geteuid() == 0, "only root can become other users")
        super().setUp()
        # Somewhere that others may enter.
        self.top = pathlib.Path(tempfile.mkdtemp(prefix="modes-", dir="/tmp"))
        self.top.chmod(0o755)
        self.umask = os.umask(0o022)
        self.addCleanup(os.umask, self.umask)
        self.count = 0

    def clean(self):
        super().clean()
        if hasattr(self, "top"):
            shutil.rmtree(self.top, ignore_errors=True)

    def seen(self, source, direct, shown, *more):
        """Who can `direct`, and who `shown`, given the mount point: names of users."""
        self.count += 1
        mnt = self.mount(source, "--allow-other", *more, name=self.top / f"m{self.count}")
        return [{name for name, user in USERS.items() if as_user(user, lambda: bool(act(at)))} for act, at in ((direct, source), (shown, mnt))]

    def native(self, change, adopt=False):
        """A store with one checkpoint, changed; (who can read it directly, through the mount)."""
        folder = self.top / f"a{self.count}"
        store = folder / "above/store"
        folder.mkdir()
        if adopt:
            (folder / "foreign").mkdir()
            (folder / "foreign/model.safetensors").write_bytes(self.model.read_bytes())
            self.run_tool("adopt", folder / "foreign", store / "one")
            data = [folder / "foreign/model.safetensors"]
        else:
            self.run_tool("import", self.model, store / "one")
            data = sorted((store / "one/data").iterdir())
        files = [store / "one/COMMIT", store / "one/index/index.sst", *data]
        change({"folder": folder, "store": store, "one": store / "one", "data": data, "files": files})
        return self.seen(store, lambda _: all(can_read(file) for file in files),
                         lambda mnt: can_read(mnt / "one/tensors/w") or can_read(mnt / "one/model.safetensors") or can_read(mnt / "one/slices/w@:"))

    def test_checkpoint_modes_match_direct_access(self):
        def chmod(what, mode, owner=0, group=0):
            def change(at):
                for path in at[what] if isinstance(at[what], list) else [at[what]]:
                    os.chown(path, owner, group)
                    os.chmod(path, mode)
            return change

        def access(what, **entries):
            def change(at):
                for path in at[what] if isinstance(at[what], list) else [at[what]]:
                    os.chown(path, 0, GROUP)
                    os.setxattr(path, "system.posix_acl_access", acl(**entries))
            return change

        both = lambda *changes: lambda at: [change(at) for change in changes]
        data_folder = lambda mode, **more: lambda at: chmod("x", mode, **more)({"x": at["one"] / "data"})
        index = lambda mode: lambda at: chmod("x", mode)({"x": at["one"] / "index"})
        above = lambda mode, **more: lambda at: chmod("x", mode, **more)({"x": at["store"].parent})
        # What shall be as without the mount; None: less will do.
        cases = {
            "all open": (lambda at: None, EVERYBODY),
            "data files of root alone": (chmod("data", 0o600), set()),
            "one of the files of a group": (chmod("data", 0o640, 0, GROUP), None),
            "everything of one group": (both(chmod("store", 0o750, 0, GROUP), chmod("one", 0o750, 0, GROUP), chmod("files", 0o640, 0, GROUP),
                                             data_folder(0o750, group=GROUP), lambda at: chmod("x", 0o750, 0, GROUP)({"x": at["one"] / "index"})),
                                        {"member", "alice"}),
            "everything of one user": (lambda at: [os.chown(path, 4242, 4242) or os.chmod(path, 0o700 if path.is_dir() else 0o600)
                                                   for path in [at["store"], *at["store"].rglob("*")]], {"alice"}),
            "data/ closed": (data_folder(0o700), set()),
            "data/ of another group": (data_folder(0o710, group=OTHER_GROUP), None),
            "index/ closed": (index(0o700), set()),
            "COMMIT closed": (lambda at: chmod("x", 0o600)({"x": at["one"] / "COMMIT"}), set()),
            "checkpoint closed": (chmod("one", 0o700), set()),
            "checkpoint to be searched, not listed": (chmod("one", 0o711), EVERYBODY),
            "store closed": (chmod("store", 0o700), set()),
            "store of a group": (chmod("store", 0o750, 0, GROUP), {"member", "alice"}),
            "a folder above closed to a group": (above(0o705, group=GROUP), None),
            "a folder above closed to its owner": (above(0o055, owner=4242, group=OTHER_GROUP), None),
            "others may what the group may not": (chmod("data", 0o604, 0, GROUP), None),
            "the owner may not what others may": (chmod("data", 0o044, 4242, OTHER_GROUP), None),
            "a list that shuts the group out": (access("one", owner=7, group=0, other=0, mask=5, users=[(65534, 5)]), None),
            "a list that shuts one user out": (access("one", owner=7, group=5, other=5, mask=5, users=[(65534, 0)]), None),
            "a list that shuts one group out": (access("data", owner=6, group=4, other=4, mask=4, groups=[(OTHER_GROUP, 0)]), None),
            "a list that lets one user in": (access("data", owner=6, group=0, other=0, mask=4, users=[(65534, 4)]), None),
            "a list without names": (access("data", owner=6, group=4, other=0, mask=0), None),
        }
        for name, (change, right) in cases.items():
            with self.subTest(name):
                direct, shown = self.native(change)
                self.assertLessEqual(shown, direct)
                if right is not None:
                    self.assertEqual((direct, shown), (right, right))

    def test_adopted_data_modes_match_direct_access(self):
        for name, change, right in (("open", lambda at: None, EVERYBODY), ("the file closed", lambda at: at["data"][0].chmod(0o600), set()),
                                    ("a folder above it closed", lambda at: at["data"][0].parent.chmod(0o700), set())):
            with self.subTest(name):
                self.assertEqual(self.native(change, adopt=True), [right, right])

    def test_foreign_checkpoint_modes_match_direct_access(self):
        for name, mode, right in (("open", 0o644, EVERYBODY), ("a shard closed", 0o600, set())):
            with self.subTest(name):
                folder = self.top / f"f{mode}"
                folder.mkdir()
                (folder / "a.safetensors").write_bytes(self.model.read_bytes())
                keys = [key for key in self.tensors]
                (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(keys, "a.safetensors")}))
                (folder / "a.safetensors").chmod(mode)
                direct, shown = self.seen(folder, lambda at: can_read(at / "a.safetensors"), lambda mnt: can_read(mnt / "tensors/w") or can_read(mnt / "model.safetensors"))
                self.assertEqual((direct, shown), (right, right))

    def test_permissions_revoked_while_mounted_apply(self):
        store = self.top / "store"
        self.run_tool("import", self.model, store / "one")
        for more in ((), ("--read-only",)):
            with self.subTest(more):
                store.chmod(0o777)
                mnt = self.mount(store, "--allow-other", *more, name=self.top / f"live{len(more)}")
                self.assertTrue(as_user(NOBODY, lambda: can_read(mnt / "one/tensors/w")))
                time.sleep(1)  # Nobody asks; the kernel's own cache of 0.4 s is over.
                store.chmod(0o700)
                self.assertFalse(as_user(NOBODY, lambda: can_list(mnt)))
                self.assertFalse(as_user(NOBODY, lambda: can_read(mnt / "one/tensors/w")))
                self.assertFalse(as_user(NOBODY, lambda: os.path.isdir(mnt / ".staging") and not os.mkdir(mnt / ".staging/evil")))
                store.chmod(0o755)
                data = store / "one/data"
                data.chmod(0o700)
                self.wait_for("data/ closed", lambda: not as_user(NOBODY, lambda: can_read(mnt / "one/tensors/w")))
                data.chmod(0o755)

    def test_only_permitted_users_may_write(self):
        store = self.top / "store"
        self.run_tool("import", self.model, store / "one")
        makes = lambda mnt: os.mkdir(mnt / f".staging/u{os.getuid()}-{self.count}") is None

        def try_make(mnt):
            try:
                return makes(mnt)
            except OSError:
                return False

        listed = acl(owner=7, group=0, other=0, mask=7, users=[(65531, 7)])
        for name, mode, xattr, right in (("open", 0o777, None, EVERYBODY), ("closed", 0o755, None, set()), ("group", 0o775, None, {"member", "alice"}),
                                         ("sticky", 0o1777, None, set()), ("list", 0o770, listed, set())):
            with self.subTest(name):
                os.chown(store, 0, GROUP)
                store.chmod(mode)
                if xattr:
                    os.setxattr(store, "system.posix_acl_access", xattr)
                self.assertEqual(self.seen(store, lambda _: False, try_make)[1], right)
                if xattr:
                    os.removexattr(store, "system.posix_acl_access")

    def test_only_the_owner_reads_the_errors_file(self):
        store = self.top / "store"
        self.run_tool("import", self.model, store / "one")
        direct, shown = self.seen(store, can_list, lambda mnt: can_read(mnt / ".tensormount/errors"))
        self.assertEqual((direct, shown), (EVERYBODY, set()))
        self.assertEqual(self.seen(store, can_list, lambda mnt: can_read(mnt / ".tensormount/status"))[1], EVERYBODY)


if __name__ == "__main__":
    harness.main()
