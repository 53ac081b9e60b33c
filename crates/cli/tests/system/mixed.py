"""One program of many that use three files through two mounts in every way that the kernel has for it.

Arguments: the mount, for how many seconds, a number of its own, and `kills` where the service is killed meanwhile. Prints how often it did what. Files are never longer than
100,000 bytes, so that all meet in the same pages.
"""
import errno, mmap, os, random, sys, time

mount, seconds, seed, may_lose = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "kills"
choose = random.Random(seed)
names = [os.path.join(mount, name) for name in ("one", "two", "three")]
MOST = 100_000


def opened(flags=os.O_RDWR):
    return os.open(choose.choice(names), flags)


def look():
    os.stat(choose.choice(names))


def read():
    fd = opened(os.O_RDONLY)
    os.pread(fd, choose.choice([100, 5000, 60_000]), choose.randrange(MOST))
    os.close(fd)


def store():
    """Stores through a map. What another one cuts off meanwhile costs SIGBUS, so a child does it."""
    child = os.fork()
    if child == 0:
        try:
            fd = opened()
            pages = mmap.mmap(fd, 8192)
            for _ in range(4):
                pages[choose.randrange(8192)] = 7
                pages.flush()
            os._exit(0)
        except (OSError, ValueError):
            os._exit(1)
    os.waitpid(child, 0)


def write():
    fd = opened()
    os.pwrite(fd, b"w" * choose.choice([10, 4096, 9000]), choose.randrange(50_000))
    os.close(fd)


def append():
    name = choose.choice(names)
    fd = os.open(name, os.O_WRONLY | os.O_APPEND)
    if os.fstat(fd).st_size < MOST:
        os.write(fd, b"a" * 100)
    os.close(fd)


def cut():
    os.truncate(choose.choice(names), choose.choice([0, 100, 20_000, 50_000, 60_001]))


def cut_open():
    fd = opened()
    os.ftruncate(fd, choose.choice([4096, 30_000, 50_000]))
    os.close(fd)


def direct():
    fd = opened(os.O_RDWR | os.O_DIRECT)
    pages = mmap.mmap(-1, 4096)
    os.preadv(fd, [pages], 4096 * choose.randrange(8))
    os.pwritev(fd, [pages], 4096 * choose.randrange(8))
    os.close(fd)


def copy():
    one, other = opened(os.O_RDONLY), opened()
    try:
        os.copy_file_range(one, other, 9000, choose.randrange(30_000), choose.randrange(50_000))
    except OSError as error:
        # Both are the same file and the ranges overlap.
        if error.errno != errno.EINVAL:
            raise
    os.close(one)
    os.close(other)


def seek():
    fd = opened(os.O_RDONLY)
    for whence in (os.SEEK_DATA, os.SEEK_HOLE, os.SEEK_END):
        try:
            os.lseek(fd, 0, whence)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
    os.close(fd)


def sync():
    fd = opened()
    os.fsync(fd)
    os.close(fd)


def punch():
    fd = opened()
    os.posix_fallocate(fd, choose.randrange(40_000), 9000)
    os.close(fd)


deeds = [look, read, store, store, write, append, cut, cut_open, direct, copy, seek, sync, punch]
done = dict.fromkeys((deed.__name__ for deed in deeds), 0)
end = time.monotonic() + seconds
while time.monotonic() < end:
    deed = choose.choice(deeds)
    try:
        deed()
    except OSError as error:
        # The service was killed, and a close tells of writes that are lost.
        if error.errno != errno.EIO or not may_lose:
            raise
    done[deed.__name__] += 1
print(sum(done.values()), done)
