/* What the loop (load.c) and the wires (wire_*.c) share.

   A wire turns one step of a workload into bytes and bytes into an answer.  It does no I/O, except for `open`, which may talk to the
   server over a blocking socket once, before anything is measured.  The loop owns sockets, time and the workload. */
#ifndef LOAD_H
#define LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_TEXT = 96, IN_BYTES = 64 * 1024, OUT_BYTES = 64 * 1024, MAX_REQUEST_BYTES = 2048 };

enum step { STEP_PREPARE, STEP_ACQUIRE, STEP_RELEASE, STEP_RENEW, STEP_CONTEND, STEP_CHECK, STEP_COUNT };

/* VERDICT_UNKNOWN is the server's own "I cannot say"; VERDICT_FAULT is an error where an answer was due. */
enum verdict {
    VERDICT_PREPARED,
    VERDICT_GRANTED,
    VERDICT_RELEASED,
    VERDICT_RENEWED,
    VERDICT_REFUSED,
    VERDICT_HELD,
    VERDICT_FREE,
    VERDICT_UNKNOWN,
    VERDICT_FAULT
};

struct answer {
    enum verdict verdict;
    uint64_t generation; /* of a grant; must rise from one grant of a connection to its next */
    uint32_t msgid;      /* where the wire has one */
};

/* A workload is three lists of steps: once before, over and over, once after. */
enum { PHASE_SETUP, PHASE_LOOP, PHASE_CLEANUP, PHASE_IDLE };
struct plan {
    const char *mode;
    enum step steps[3][3];
    unsigned size[3];
};

struct samples {
    uint64_t *ns;
    size_t count, room;
};

/* What a run measured.  `granted` counts a preload, `loops` everything else. */
struct outcome {
    struct samples step[STEP_COUNT], loop;
    uint64_t loops, granted;
    double cpu_seconds, elapsed_seconds;
};

struct options {
    const char *address;
    const char *mode;
    unsigned connections;
    double seconds, warmup;
    unsigned ttl_seconds;
    uint64_t key_range;    /* keys are drawn from this many, per connection */
    uint64_t first, count; /* preload: keys first .. first + count - 1 */
    unsigned in_flight;    /* preload: unanswered requests per connection */
    bool request_id;
};

struct connection {
    unsigned index;
    int fd;
    uint64_t random;        /* state of the generator */
    char key[MAX_TEXT];     /* of the lease this connection works on */
    char holder[MAX_TEXT];
    char fence[MAX_TEXT];   /* the credential of the present grant: the server's, or for Redis the value this client drew */
    char lease_id[MAX_TEXT]; /* etcd: the lease that this connection's keys hang on */
    uint64_t generation;    /* of the last grant seen here; 0 before the first */
    uint32_t msgid;         /* of the last request sent */
    enum step step;         /* of the oldest unanswered request */
    uint64_t sent_ns, loop_ns;
    unsigned phase, position, outstanding;
    bool wants_out;
    size_t in_size, out_from, out_size;
    char in[IN_BYTES];
    char out[OUT_BYTES];
};

struct wire {
    const char *name;
    bool prepares; /* every connection begins with STEP_PREPARE */
    bool renews;   /* false: the modes `renew` and `check` are not written for it */
    bool has_msgid; /* replies name the request they answer */
    void (*open)(int fd);
    /* Appends the request for `step` at `out` (MAX_REQUEST_BYTES are free there) and returns its length. */
    size_t (*request)(struct connection *c, enum step step, char *out);
    /* Bytes consumed; 0 when the reply is not complete yet; -1 when it cannot be a reply. */
    ssize_t (*reply)(struct connection *c, enum step step, const char *in, size_t size, struct answer *answer);
};

extern const struct wire wire_leased, wire_redis, wire_etcd;
extern const char *const step_names[STEP_COUNT];
extern struct options options;
extern struct plan plan;
extern const struct wire *wire; /* the one in use */
extern bool preloading;

/* Drives the plan to its end; exits 2 or 3 when anything but the answer due comes back. */
void run_loop(struct outcome *outcome);

/* Ends the run: exit 2, the reason on standard error. */
void die(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
uint64_t draw(uint64_t *state);

#endif
