"""Spanish sentences for the demo crawl."""

from pipeline.demo_crawl.speech import Speech

SPANISH = Speech(
    language="es",
    menu=("Inicio", "Artículos", "Agenda", "Quiénes somos", "Contacto"),
    titles=("{cosa}: un reportaje", "Todo sobre {tema}", "Un día {lugar}", "{tema}, ayer y hoy"),
    templates=(
        "{antes}, {persona} encontró {objeto} {lugar}.",
        "{persona} vendió {objeto} {antes}.",
        "{siempre}, {persona} lee el periódico {lugar}.",
        "{cosa} estaba {estado} {antes}.",
        "{persona} buscaba {objeto} {lugar} {cuando}.",
        "Nadie sabía por qué {persona} guardaba {objeto}.",
        "{siempre}, {cosa} está {estado}.",
        "Por {numero} euros se compra {objeto} {lugar}.",
        "Cuentan que {persona} perdió {objeto} {antes}.",
        "{cuando}, {persona} esperaba {lugar}.",
        "Hay que preguntar si {cosa} está {estado}.",
        "Después, {persona} llevó {objeto} a casa.",
        "Quizás {persona} encuentre {objeto} {lugar}.",
        "Pasaron {numero} horas hasta que {persona} recuperó {objeto}.",
        "Desde hace {numero} años, {persona} espera {lugar} con {objeto}.",
        "Por desgracia, {cosa} estaba {estado} {antes}.",
        "Con {numero} amigos, {persona} visitó una exposición sobre {tema}.",
        "A {persona} le gusta hablar sobre {tema} {lugar}.",
        "Cuando {cosa} está {estado}, {persona} se queda en casa.",
        "Según {persona}, {cosa} parece estar {estado}.",
        "Una charla sobre {tema} tuvo lugar {antes} {lugar}.",
        "Apenas {persona} tomó {objeto}, empezó a llover.",
        "{siempre}, {persona} abre la ventana para oír los pájaros.",
        "A pesar de todo, {persona} conservó {objeto} durante {numero} días.",
        "Quienes estudian {tema} se reúnen {siempre} {lugar}.",
        "Un cartel sobre {tema} estuvo {numero} semanas {lugar}.",
        "Por suerte, {persona} tenía {objeto} {cuando}.",
        "Al final todos sonreían, porque {cosa} estaba {estado}.",
        "{persona} mostró {objeto} a los niños {lugar}.",
        "Antiguamente había {numero} tiendas {lugar}.",
        "El periódico publicó {antes} un artículo sobre {tema}.",
        "{cuando}, {persona} encontró por fin {objeto}.",
        "Solo el cartero pensaba que {cosa} seguía {estado}.",
        "Tras {numero} minutos, {persona} aún buscaba {objeto}.",
        "{antes}, {persona} saludó a un viejo amigo {lugar}.",
        "La conversación trataba {antes} sobre {tema}.",
        "Sin {objeto}, {persona} nunca sale de casa.",
        "{siempre} vemos a {persona} {lugar} con {objeto}.",
        "Nada cambia {lugar}, y {cosa} sigue {estado}.",
        "Leímos {numero} páginas sobre {tema} {cuando}.",
    ),
    phrases={
        "antes": (
            "ayer por la noche / hace tres semanas / el verano pasado / el viernes pasado / una mañana de niebla / "
            "poco antes de Navidad / hacia la medianoche / después de la tormenta / hace muchos años / "
            "el primer día de clase"
        ),
        "siempre": (
            "cada mañana / los domingos / en otoño / por la tarde / con buen tiempo / de vez en cuando / "
            "normalmente / los días de fiesta / en invierno / después del trabajo"
        ),
        "persona": (
            "la panadera del pueblo / mi abuela / un viejo pescador / la joven maestra / nuestro vecino / "
            "una jardinera / el revisor del tren / un estudiante de Sevilla / la alcaldesa / mi hermano / "
            "el relojero / una viajera de Lima / la bibliotecaria / el molinero / un cartero amable"
        ),
        "objeto": (
            "una cesta de manzanas / la vieja bicicleta / una tetera de porcelana / la llave del sótano / "
            "una larga carta / el mapa de la comarca / pan recién hecho / un libro sobre aves / una caja de fotos / "
            "un par de guantes / el diario de ayer / un ramo de tulipanes / la receta del pastel de ciruelas / "
            "una lámpara nueva / un paraguas verde"
        ),
        "lugar": (
            "en la plaza del mercado / detrás de la iglesia / a la orilla del lago / en el pequeño taller / "
            "delante del ayuntamiento / en el jardín del museo / junto al viejo molino / en la parada del tranvía / "
            "sobre el puente / en una calle tranquila / bajo los tilos / en lo alto de la colina / en el puerto / "
            "en la cocina"
        ),
        "cuando": (
            "mientras llovía sin parar / antes de que llegaran los invitados / cuando el tren ya había salido / "
            "en cuanto volvió el sol / aunque la carretera estaba cortada / mientras sonaban las campanas / "
            "a pesar del frío de febrero / en mitad de la fiesta / durante el apagón"
        ),
        "estado": (
            "casi al alcance de todos / igual que siempre / en buen estado / mejor de lo esperado / "
            "lejos del centro / a punto de desaparecer / fuera de lo común / de moda en la región / peor que nunca / "
            "en obras"
        ),
        "cosa": (
            "el viejo puente / el horario de trenes / el pequeño café / la exposición / el camino del lago / "
            "el agua de la fuente / la sopa del día / la vista desde la torre / el concierto del parque / el taller"
        ),
        "tema": (
            "la historia de la ciudad / las plantas raras / la vida de las abejas / los mapas antiguos / "
            "el arte de la cocina / la construcción de violines / los países lejanos / las estrellas del invierno / "
            "la navegación por el río / las novelas policíacas"
        ),
        "numero": "dos / tres / cuatro / cinco / siete / ocho / diez / doce / veinte",
    },
)
