// A library that misbehaves while it is loaded into a child process of cs336, in the way that LIBRARY_FAULT names; a wall
// clock that jumps, and an end in the middle of a write. Preloaded (ld.so(8), LD_PRELOAD) into the processes that
// suites/isolation/crashes.rs and suites/cli/leftovers.rs start.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int is(const char *fault) {
    const char *wanted = getenv("LIBRARY_FAULT");
    return wanted && strcmp(wanted, fault) == 0;
}

// Starts a process with copies of all descriptors; it ends only when it is killed.
static void start_child(int prints) {
    if (fork() != 0) return;
    for (;;) {
        if (prints)
            while (write(1, "spam\n", 5) == 5) {}
        pause();
    }
}

__attribute__((constructor)) static void misbehave(void) {
    // Workers and Python peers have this variable; cs336 itself has not.
    if (!getenv("CS336_PARENT")) return;
    if (is("prints_a_byte_that_is_not_utf8")) (void)!write(1, "caf\xe9", 4);
    // libc writes 4,096 bytes at a time, and so ends in the middle of a line.
    if (is("prints_150_lines"))
        for (int i = 0; i < 150; i++) printf("line %d of a library, which libc's buffer cuts\n", i);
    if (is("prints_without_end")) start_child(1);
    if (is("detaches_a_process") && fork() == 0) {
        setsid();
        start_child(0);
        _exit(0);
    }
    if (is("crashes_with_a_living_child")) {
        start_child(0);
        abort();
    }
    if (is("hangs_with_a_living_child")) {
        start_child(0);
        for (;;) pause();
    }
    if (is("leaves_its_process_group")) {
        setpgid(0, getpgid(getppid()));
        for (;;) pause();
    }
    if (is("stops")) raise(SIGSTOP);
    if (is("closes_the_socket")) close(0);
    if (is("writes_to_the_socket")) (void)!write(0, "chatter\n", 8);
    if (is("makes_the_socket_non_blocking")) fcntl(0, F_SETFL, O_NONBLOCK);
}

static char last_reply[1 << 16];
static size_t last_length;

// A worker sends the reply of its last case again when it takes the next one.
ssize_t write(int fd, const void *bytes, size_t length) {
    if (is("answers_twice") && length < sizeof last_reply && memmem(bytes, length, "\"ended\"", 7)) {
        memcpy(last_reply, bytes, length);
        last_length = length;
    }
    return syscall(SYS_write, fd, bytes, length);
}

ssize_t read(int fd, void *bytes, size_t length) {
    ssize_t count = syscall(SYS_read, fd, bytes, length);
    if (is("answers_twice") && count > 0 && last_length && memmem(bytes, count, "\"measure\"", 9))
        (void)!syscall(SYS_write, fd, last_reply, last_length);
    return count;
}

// Every second look at the wall clock is ten years earlier.
int clock_gettime(clockid_t clock, struct timespec *time) {
    static int looks;
    int failed = (int)syscall(SYS_clock_gettime, clock, time);
    if (failed == 0 && clock == CLOCK_REALTIME && is("makes_the_clock_jump") && looks++ % 2)
        time->tv_sec -= 10L * 365 * 24 * 3600;
    return failed;
}

// A file is synced when its temporary one is written and has not yet the file's name.
int fsync(int fd) {
    if (is("is_killed_as_it_writes")) raise(SIGKILL);
    while (is("hangs_as_it_writes")) pause();
    return (int)syscall(SYS_fsync, fd);
}
