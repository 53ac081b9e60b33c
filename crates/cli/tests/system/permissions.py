# Carries out operations on files as one user after the other, for permissions.rs: a line of JSON in, a line
# out. Needs root. One argument: the folder of the tree.
import ctypes
import errno
import json
import os
import sys

libc = ctypes.CDLL(None, use_errno=True)
os.chdir(sys.argv[1])
os.umask(0)
NOFOLLOW = {"follow_symlinks": False}


def rename(source, target, flags):
    at = -100  # AT_FDCWD
    if libc.renameat2(at, source.encode(), at, target.encode(), flags) != 0:
        raise OSError(ctypes.get_errno(), "renameat2")


def open_and_close(path, flags, mode=0):
    os.close(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode))


def stat(path):
    found = os.lstat(path)
    return [found.st_mode, found.st_uid, found.st_gid, found.st_nlink, found.st_size]


OPERATIONS = {
    "stat": stat,
    "open": lambda path, access: open_and_close(path, [os.O_RDONLY, os.O_WRONLY, os.O_RDWR][access - 1]),
    "create": lambda path, mode: open_and_close(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode),
    "mkdir": lambda path, mode: os.mkdir(path, mode),
    "mknod": lambda path, mode, device: os.mknod(path, mode, device),
    "symlink": lambda path, target: os.symlink(target, path),
    "link": lambda source, target: os.link(source, target, follow_symlinks=False),
    "unlink": os.unlink,
    "rmdir": os.rmdir,
    "rename": rename,
    "chmod": lambda path, mode: os.chmod(path, mode),
    "chown": lambda path, uid, gid: os.chown(path, uid, gid, **NOFOLLOW),
    "truncate": lambda path, size: os.truncate(path, size),
    "touch": lambda path: os.utime(path, None, **NOFOLLOW),
    "utime": lambda path: os.utime(path, (1, 1), **NOFOLLOW),
    "list": lambda path: os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)),
    "getxattr": lambda path, name: os.getxattr(path, name, **NOFOLLOW).hex(),
    "setxattr": lambda path, name, value: os.setxattr(path, name, bytes.fromhex(value), **NOFOLLOW),
    "removexattr": lambda path, name: os.removexattr(path, name, **NOFOLLOW),
}

for line in sys.stdin:
    (uid, gid, groups), operation, arguments = json.loads(line)
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(uid)
    try:
        answer = [0, OPERATIONS[operation](*arguments)]
    except OSError as error:
        answer = [error.errno, None]
    os.seteuid(0)
    os.setegid(0)
    print(json.dumps(answer), flush=True)
