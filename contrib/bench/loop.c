/* The loop: sockets, time, and which step of its plan each connection is at.

   All connections finish their set-up before the first one enters the loop; the measured span begins `warmup` seconds later.  When it
   is over every connection finishes the round it is in, cleans up and falls idle, so that no lease is left behind. */
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { SILENCE_MS = 15000, SHOWN_BYTES = 600 };

static const enum verdict due[STEP_COUNT] = {
    VERDICT_PREPARED, VERDICT_GRANTED, VERDICT_RELEASED, VERDICT_RENEWED, VERDICT_REFUSED, VERDICT_HELD,
};
static const char *const verdict_names[] = {"prepared", "granted", "released", "renewed", "refused", "held", "free", "unknown", "an error"};

static struct connection *connections;
static struct outcome *result;
static int poller;
static bool looping, stopping;
static unsigned in_setup, not_idle, unanswered;
static uint64_t measure_from, measure_until, preload_sent;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static void keep(struct samples *s, uint64_t ns) {
    if (s->count == s->room) {
        s->room = s->room ? s->room * 2 : 1 << 18;
        s->ns = realloc(s->ns, s->room * sizeof *s->ns);
        if (!s->ns)
            die("out of memory for samples");
    }
    s->ns[s->count++] = ns;
}

/* Ends the run over a reply that is not the one due: exit 3, the reply's first bytes on standard error. */
static void reject(const struct connection *c, const char *what, const char *bytes, size_t size) {
    fprintf(stderr, "load: %s %s, connection %u, step %s, key %s: %s; the reply:\n", wire->name, options.mode, c->index,
            step_names[c->step], c->key, what);
    for (size_t i = 0; i < size && i < SHOWN_BYTES; i++) {
        unsigned char byte = (unsigned char)bytes[i];
        fprintf(stderr, byte >= 0x20 && byte < 0x7f ? "%c" : "\\x%02x", byte);
    }
    fputc('\n', stderr);
    exit(3);
}

static int open_socket(void) {
    const char *colon = strrchr(options.address, ':');
    bool tcp = colon && !strchr(options.address, '/');
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    struct sockaddr_in in = {.sin_family = AF_INET};
    if (tcp) {
        char host[64];
        snprintf(host, sizeof host, "%.*s", (int)(colon - options.address), options.address);
        in.sin_port = htons((uint16_t)atoi(colon + 1));
        if (inet_pton(AF_INET, host, &in.sin_addr) != 1)
            die("%s is not a numeric IPv4 address", host);
    } else {
        if (strlen(options.address) >= sizeof un.sun_path)
            die("socket path is longer than %zu bytes", sizeof un.sun_path - 1);
        strcpy(un.sun_path, options.address);
    }
    int fd = socket(tcp ? AF_INET : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, tcp ? (struct sockaddr *)&in : (struct sockaddr *)&un, tcp ? sizeof in : sizeof un) < 0)
        die("connect %s: %s", options.address, strerror(errno));
    if (tcp)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    return fd;
}

static void flush_out(struct connection *c) {
    while (c->out_from < c->out_size) {
        ssize_t sent = send(c->fd, c->out + c->out_from, c->out_size - c->out_from, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno != EAGAIN)
            die("connection %u: send: %s", c->index, strerror(errno));
        if (sent < 0)
            break;
        c->out_from += (size_t)sent;
    }
    if (c->out_from == c->out_size)
        c->out_from = c->out_size = 0;
    bool wanted = c->out_size > 0;
    struct epoll_event event = {.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.ptr = c};
    if (c->wants_out != wanted && epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event) < 0)
        die("epoll_ctl: %s", strerror(errno));
    c->wants_out = wanted;
}

static void append_request(struct connection *c, enum step step, uint64_t now) {
    c->step = step;
    c->sent_ns = now;
    c->msgid++;
    c->out_size += wire->request(c, step, c->out + c->out_size);
    c->outstanding++;
    unanswered++;
}

static void fall_idle(struct connection *c) {
    c->phase = PHASE_IDLE;
    not_idle--;
}

/* Preload: keeps the connection at in_flight unanswered grants while keys remain. */
static void top_up(struct connection *c, uint64_t now) {
    while (preload_sent < options.count && c->outstanding < options.in_flight && c->out_size + MAX_REQUEST_BYTES <= OUT_BYTES) {
        snprintf(c->key, sizeof c->key, "preload/%08" PRIu64, options.first + preload_sent++);
        append_request(c, STEP_ACQUIRE, now);
    }
    if (!c->outstanding)
        fall_idle(c);
}

/* Sends the next step of this connection's plan, or leaves it waiting for the others' set-up, or idle at the end. */
static void advance(struct connection *c, uint64_t now) {
    if (c->phase == PHASE_SETUP && c->position == plan.size[PHASE_SETUP]) {
        if (!looping)
            return;
        c->phase = PHASE_LOOP;
        c->position = 0;
    }
    if (c->phase == PHASE_LOOP && preloading) {
        top_up(c, now);
        return;
    }
    if (c->phase == PHASE_LOOP && c->position == plan.size[PHASE_LOOP])
        c->position = 0;
    if (c->phase == PHASE_LOOP && c->position == 0) {
        c->loop_ns = now;
        if (stopping)
            c->phase = PHASE_CLEANUP;
    }
    if (c->phase == PHASE_CLEANUP && c->position == plan.size[PHASE_CLEANUP])
        fall_idle(c);
    if (c->phase == PHASE_IDLE)
        return;
    enum step step = plan.steps[c->phase][c->position];
    if (step == STEP_ACQUIRE)
        snprintf(c->key, sizeof c->key, "bench/%u/%" PRIu64, c->index, draw(&c->random) % options.key_range);
    append_request(c, step, now);
}

/* Checks one answer, counts it, and moves the connection on by one step. */
static void settle(struct connection *c, const struct answer *answer, const char *bytes, size_t size, uint64_t now) {
    bool pipelined = preloading && c->phase == PHASE_LOOP;
    if (answer->verdict != due[c->step]) {
        char what[96];
        snprintf(what, sizeof what, "%s where %s is due", verdict_names[answer->verdict], verdict_names[due[c->step]]);
        reject(c, what, bytes, size);
    }
    if (wire->has_msgid && (pipelined ? answer->msgid > c->msgid : answer->msgid != c->msgid))
        reject(c, "an answer to a request not asked", bytes, size);
    if (c->step == STEP_ACQUIRE && answer->generation <= (pipelined ? 0 : c->generation))
        reject(c, "a generation that did not rise", bytes, size);
    if (c->step == STEP_ACQUIRE)
        c->generation = answer->generation;
    c->outstanding--;
    unanswered--;
    if (pipelined) {
        result->granted++;
        return;
    }
    c->position++;
    if (c->phase == PHASE_LOOP && c->sent_ns >= measure_from && now < measure_until) {
        keep(&result->step[c->step], now - c->sent_ns);
        if (c->position == plan.size[PHASE_LOOP] && c->loop_ns >= measure_from) {
            keep(&result->loop, now - c->loop_ns);
            result->loops++;
        }
    }
    if (c->phase == PHASE_SETUP && c->position == plan.size[PHASE_SETUP])
        in_setup--;
}

static void on_readable(struct connection *c) {
    ssize_t got = recv(c->fd, c->in + c->in_size, IN_BYTES - c->in_size, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (got <= 0)
        reject(c, got ? strerror(errno) : "the server closed the connection", c->in, c->in_size);
    c->in_size += (size_t)got;
    size_t from = 0;
    uint64_t now = now_ns();
    while (from < c->in_size) {
        struct answer answer = {.verdict = VERDICT_FAULT};
        const char *bytes = c->in + from;
        ssize_t size = wire->reply(c, c->step, bytes, c->in_size - from, &answer);
        if (size == 0)
            break;
        if (size < 0)
            reject(c, "bytes that are no reply", bytes, c->in_size - from);
        if (!c->outstanding)
            reject(c, "a reply that nothing asked for", bytes, (size_t)size);
        settle(c, &answer, bytes, (size_t)size, now);
        from += (size_t)size;
        if (!preloading || c->phase == PHASE_SETUP)
            advance(c, now);
    }
    memmove(c->in, c->in + from, c->in_size -= from);
    if (c->in_size == IN_BYTES)
        reject(c, "a reply larger than the buffer", c->in, c->in_size);
    if (preloading && c->phase == PHASE_LOOP)
        top_up(c, now);
    flush_out(c);
}

static void open_connections(void) {
    uint64_t seed = now_ns() ^ ((uint64_t)getpid() << 32);
    connections = calloc(options.connections, sizeof *connections);
    if (!connections)
        die("out of memory for connections");
    for (unsigned i = 0; i < options.connections; i++) {
        struct connection *c = &connections[i];
        c->index = i;
        c->random = seed + i * 0x632be59bd9b4e019u;
        c->fd = open_socket();
        snprintf(c->holder, sizeof c->holder, preloading ? "preload" : "bench-holder-%u", i);
        if (wire->open && i == 0)
            wire->open(c->fd);
        fcntl(c->fd, F_SETFL, O_NONBLOCK);
        if (epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &(struct epoll_event){.events = EPOLLIN, .data.ptr = c}) < 0)
            die("epoll_ctl: %s", strerror(errno));
    }
    in_setup = plan.size[PHASE_SETUP] ? options.connections : 0;
    not_idle = options.connections;
}

static void start_all(void) {
    for (unsigned i = 0; i < options.connections; i++) {
        advance(&connections[i], now_ns());
        flush_out(&connections[i]);
    }
}

void run_loop(struct outcome *outcome) {
    struct epoll_event events[64];
    uint64_t start = now_ns();
    bool warmed = false;
    result = outcome;
    poller = epoll_create1(EPOLL_CLOEXEC);
    open_connections();
    if (in_setup)
        start_all();
    while (not_idle) {
        uint64_t now = now_ns();
        if (!looping && !in_setup) {
            looping = true;
            measure_from = now + (preloading ? 0 : (uint64_t)(options.warmup * 1e9));
            measure_until = preloading ? UINT64_MAX : measure_from + (uint64_t)(options.seconds * 1e9);
            start_all();
        }
        if (looping && !warmed && now >= measure_from) {
            warmed = true;
            outcome->cpu_seconds = cpu_seconds();
        }
        if (looping && !stopping && now >= measure_until) {
            stopping = true;
            outcome->cpu_seconds = cpu_seconds() - outcome->cpu_seconds;
        }
        if (!not_idle)
            break;
        int ready = epoll_wait(poller, events, 64, SILENCE_MS);
        if (ready < 0 && errno != EINTR)
            die("epoll_wait: %s", strerror(errno));
        if (ready == 0)
            die("%s %s: no reply for %d s, %u requests unanswered", wire->name, options.mode, SILENCE_MS / 1000, unanswered);
        for (int i = 0; i < ready; i++) {
            if (events[i].events & EPOLLOUT)
                flush_out(events[i].data.ptr);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                on_readable(events[i].data.ptr);
        }
    }
    outcome->elapsed_seconds = (double)(now_ns() - start) / 1e9;
}
