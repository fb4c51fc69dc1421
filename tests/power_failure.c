/* LD_PRELOAD shim: logs what processes do to the files below $POWER_ROOT, in one order, to $POWER_LOG.
 *
 * A log entry: u64 kind, u64 inode, u64 number (offset or size), u64 bytes of a, u64 bytes of b, a, b
 *   W  a = data            bytes written at offset `number` of an inode
 *   T                      an inode cut or extended to `number` bytes
 *   S                      an inode (file or directory) synced
 *   N  a = path            a name means this inode: created or opened (`number` 0), or made as a directory (1)
 *   R  a = path, b = path  renamed
 *   U  a = path            a name removed
 * Every call and its entry are under one lock, so that the order of the log is the order of the calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int log_fd(void) { /* opened for each call: flock is per open file, and a fork must not share it */
    const char *path = getenv("POWER_LOG");
    int fd = path ? syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) while (flock(fd, LOCK_EX) && errno == EINTR) {}
    return fd;
}

static void put(int fd, const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t done = syscall(SYS_write, fd, at, size);
        if (done <= 0) abort();
        at += done, size -= done;
    }
}

static void entry(int log, char kind, uint64_t inode, uint64_t number, const void *a, size_t an, const void *b, size_t bn) {
    uint64_t head[5] = {kind, inode, number, an, bn};
    put(log, head, sizeof head), put(log, a, an), put(log, b, bn);
}

static int below(const char *path) {
    const char *root = getenv("POWER_ROOT");
    size_t n = root ? strlen(root) : 0;
    return n && !strncmp(path, root, n) && (path[n] == '/' || !path[n]);
}

static int named(int dir, const char *name, char *out) { /* the absolute path of a name; not resolved further */
    char base[PATH_MAX] = "";
    if (name[0] != '/') {
        if (dir == AT_FDCWD) { if (!getcwd(base, sizeof base)) return 0; }
        else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
            ssize_t n = readlink(link, base, sizeof base - 1);
            if (n < 0) return 0;
            base[n] = 0;
        }
        while (!strncmp(name, "./", 2)) name += 2;
    }
    if ((size_t)snprintf(out, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", name) >= PATH_MAX) return 0;
    return below(out);
}

static uint64_t of_fd(int fd) { /* the inode of a descriptor of a file or directory below the root, or 0 */
    char link[64], path[PATH_MAX];
    struct stat found;
    if (!getenv("POWER_ROOT")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    if (!below(path) || fstat(fd, &found) || !(S_ISREG(found.st_mode) || S_ISDIR(found.st_mode))) return 0;
    return found.st_ino;
}

static void opened(int dir, const char *name, int fd, int flags) {
    char path[PATH_MAX];
    struct stat found;
    if (fd < 0 || !named(dir, name, path) || fstat(fd, &found)) return;
    if (!S_ISREG(found.st_mode)) return;
    int saved = errno, log = log_fd();
    entry(log, 'N', found.st_ino, 0, path, strlen(path), 0, 0);
    if (flags & O_TRUNC) entry(log, 'T', found.st_ino, 0, 0, 0, 0, 0);
    close(log), errno = saved;
}

#define OPEN(symbol, declared, dirarg, call) \
    int symbol declared { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        int fd = call; \
        opened(dirarg, path, fd, flags); \
        return fd; \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, REAL(open)(path, flags, mode))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, REAL(open64)(path, flags, mode))
OPEN(openat, (int dir, const char *path, int flags, ...), dir, REAL(openat)(dir, path, flags, mode))
OPEN(openat64, (int dir, const char *path, int flags, ...), dir, REAL(openat64)(dir, path, flags, mode))

static void wrote(int log, uint64_t inode, off_t at, const void *data, ssize_t done) {
    if (done > 0) entry(log, 'W', inode, at, data, done, 0, 0);
}

ssize_t write(int fd, const void *data, size_t size) {
    uint64_t inode = of_fd(fd);
    if (!inode) return REAL(write)(fd, data, size);
    int log = log_fd();
    ssize_t done = REAL(write)(fd, data, size);
    int saved = errno;
    wrote(log, inode, lseek(fd, 0, SEEK_CUR) - done, data, done);
    close(log), errno = saved;
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (!of_fd(fd)) return REAL(writev)(fd, parts, count);
    ssize_t total = 0;
    for (int n = 0; n < count; n++) {
        ssize_t done = write(fd, parts[n].iov_base, parts[n].iov_len);
        if (done < 0) return total ? total : done;
        total += done;
        if ((size_t)done < parts[n].iov_len) break;
    }
    return total;
}

#define PWRITE(symbol) \
    ssize_t symbol(int fd, const void *data, size_t size, off_t at) { \
        uint64_t inode = of_fd(fd); \
        if (!inode) return REAL(symbol)(fd, data, size, at); \
        int log = log_fd(); \
        ssize_t done = REAL(symbol)(fd, data, size, at); \
        int saved = errno; \
        wrote(log, inode, at, data, done); \
        close(log), errno = saved; \
        return done; \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

static void copied(int log, uint64_t inode, int fd, off_t at, ssize_t done) { /* the kernel copied: read it back */
    char link[64], *data = malloc(done > 0 ? done : 1);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int again = syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
    if (done > 0 && pread(again, data, done, at) == done) wrote(log, inode, at, data, done);
    close(again), free(data);
}

#define SENDFILE(symbol) \
    ssize_t symbol(int out, int in, off_t *from, size_t size) { \
        uint64_t inode = of_fd(out); \
        if (!inode) return REAL(symbol)(out, in, from, size); \
        int log = log_fd(); \
        ssize_t done = REAL(symbol)(out, in, from, size); \
        int saved = errno; \
        copied(log, inode, out, lseek(out, 0, SEEK_CUR) - done, done); \
        close(log), errno = saved; \
        return done; \
    }
SENDFILE(sendfile)
SENDFILE(sendfile64)

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t size, unsigned flags) {
    uint64_t inode = of_fd(out);
    if (!inode) return REAL(copy_file_range)(in, from, out, to, size, flags);
    int log = log_fd();
    ssize_t done = REAL(copy_file_range)(in, from, out, to, size, flags);
    int saved = errno;
    copied(log, inode, out, (to ? *to : lseek(out, 0, SEEK_CUR)) - done, done);
    close(log), errno = saved;
    return done;
}

#define ON_INODE(symbol, declared, call, kind, number) \
    int symbol declared { \
        uint64_t inode = of_fd(fd); \
        if (!inode) return call; \
        int log = log_fd(); \
        int done = call, saved = errno; \
        if (!done) entry(log, kind, inode, number, 0, 0, 0, 0); \
        close(log), errno = saved; \
        return done; \
    }
ON_INODE(fsync, (int fd), REAL(fsync)(fd), 'S', 0)
ON_INODE(fdatasync, (int fd), REAL(fdatasync)(fd), 'S', 0)
ON_INODE(ftruncate, (int fd, off_t size), REAL(ftruncate)(fd, size), 'T', size)
ON_INODE(ftruncate64, (int fd, off_t size), REAL(ftruncate64)(fd, size), 'T', size)

static int moved(int log, int done, const char *from, const char *to) {
    int saved = errno;
    if (!done) entry(log, 'R', 0, 0, from, strlen(from), to, strlen(to));
    close(log), errno = saved;
    return done;
}

int rename(const char *from, const char *to) {
    char a[PATH_MAX], b[PATH_MAX];
    if (!named(AT_FDCWD, from, a) || !named(AT_FDCWD, to, b)) return REAL(rename)(from, to);
    int log = log_fd();
    return moved(log, REAL(rename)(from, to), a, b);
}

int renameat(int olddir, const char *from, int newdir, const char *to) {
    char a[PATH_MAX], b[PATH_MAX];
    if (!named(olddir, from, a) || !named(newdir, to, b)) return REAL(renameat)(olddir, from, newdir, to);
    int log = log_fd();
    return moved(log, REAL(renameat)(olddir, from, newdir, to), a, b);
}

static int removed(int log, int done, const char *path) {
    int saved = errno;
    if (!done) entry(log, 'U', 0, 0, path, strlen(path), 0, 0);
    close(log), errno = saved;
    return done;
}

#define REMOVE(symbol, declared, dir, call) \
    int symbol declared { \
        char full[PATH_MAX]; \
        if (!named(dir, path, full)) return call; \
        int log = log_fd(); \
        return removed(log, call, full); \
    }
REMOVE(unlink, (const char *path), AT_FDCWD, REAL(unlink)(path))
REMOVE(rmdir, (const char *path), AT_FDCWD, REAL(rmdir)(path))
REMOVE(unlinkat, (int dir, const char *path, int flags), dir, REAL(unlinkat)(dir, path, flags))

static int made(int log, int done, const char *path) {
    struct stat found;
    int saved = errno;
    if (!done && !stat(path, &found)) entry(log, 'N', found.st_ino, 1, path, strlen(path), 0, 0);
    close(log), errno = saved;
    return done;
}

#define MAKE(symbol, declared, dir, call) \
    int symbol declared { \
        char full[PATH_MAX]; \
        if (!named(dir, path, full)) return call; \
        int log = log_fd(); \
        return made(log, call, full); \
    }
MAKE(mkdir, (const char *path, mode_t mode), AT_FDCWD, REAL(mkdir)(path, mode))
MAKE(mkdirat, (int dir, const char *path, mode_t mode), dir, REAL(mkdirat)(dir, path, mode))
